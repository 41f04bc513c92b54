"""Clipping by the norm of a model in parts is that of one process that holds the whole model."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.optimizer_hooks import GradientClipping, GradientLARS

from chainermn_comm import PeerError, Sharding
from chainermn_modelparallel import ColumnParallelLinear, RowParallelLinear
from chainermn_train import MultiNodeGradientClipping, create_multi_node_optimizer

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 4)]

WIDTH = 6
THRESHOLD = 0.01  # less than the norm of each update
UPDATES = 20


class InParts(chainer.Chain):
    """Two layers of which each rank of a group has a part."""

    def __init__(self, group):
        super().__init__()
        np.random.seed(0)
        with self.init_scope():
            self.hidden = ColumnParallelLinear(WIDTH, WIDTH, group, gather_output=False)
            self.output = RowParallelLinear(WIDTH, 2, group, input_is_parallel=True)
        for param in (self.hidden.W, self.hidden.b, self.output.W):
            param.shardings = (Sharding("shard", group),)

    def forward(self, x):
        return F.mean(self.output(F.tanh(self.hidden(x))) ** 2)


class Whole(chainer.Chain):
    def __init__(self):
        super().__init__()
        np.random.seed(0)
        with self.init_scope():
            self.hidden = L.Linear(WIDTH, WIDTH)
            self.output = L.Linear(WIDTH, 2)

    def forward(self, x):
        return F.mean(self.output(F.tanh(self.hidden(x))) ** 2)


def batch(copy, number):
    return np.random.default_rng((copy, number)).standard_normal((3, WIDTH))


def assert_parts_of(whole, model, group):
    rows = np.array_split(np.arange(WIDTH), group.size)[group.rank]
    for part, expected in (
        (model.hidden.W, whole.hidden.W.array[rows]),
        (model.hidden.b, whole.hidden.b.array[rows]),
        (model.output.W, whole.output.W.array[:, rows]),
        (model.output.b, whole.output.b.array),
    ):
        np.testing.assert_allclose(part.array, expected, rtol=0, atol=1e-10)


def test_parameters_follow_one_process(naive, double_precision):
    """Two ranks have a model; on four ranks, two pairs train with examples of their own."""
    copies = naive.size // 2
    group = naive.split(naive.rank // 2, naive.rank)
    same_part = naive.split(naive.rank % 2, naive.rank)
    model = InParts(group)
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.5), same_part
    ).setup(model)
    optimizer.add_hook(MultiNodeGradientClipping(THRESHOLD, naive))
    whole = Whole()
    expected = chainer.optimizers.MomentumSGD(0.5).setup(whole)
    expected.add_hook(GradientClipping(THRESHOLD))
    for number in range(UPDATES):
        optimizer.update(model, batch(naive.rank // 2, number))
        examples = [batch(each, number) for each in range(copies)]
        expected.update(whole, np.concatenate(examples))
    assert_parts_of(whole, model, group)


def test_it_serves_a_plain_optimizer_too(naive, double_precision):
    group = naive.split(naive.rank // 2, naive.rank)
    model = InParts(group)
    optimizer = chainer.optimizers.SGD(0.5).setup(model)
    optimizer.add_hook(MultiNodeGradientClipping(THRESHOLD, group))
    whole = Whole()
    expected = chainer.optimizers.SGD(0.5).setup(whole)
    expected.add_hook(GradientClipping(THRESHOLD))
    for number in range(UPDATES):
        optimizer.update(model, batch(0, number))
        expected.update(whole, batch(0, number))
    assert_parts_of(whole, model, group)


def test_gradients_below_the_threshold_stay_as_they_are(naive):
    model = L.Linear(2, 2)
    model.cleargrads()
    model.W.grad = np.ones((2, 2), "f4")
    optimizer = chainer.optimizers.SGD().setup(model)
    hook = MultiNodeGradientClipping(2.0, naive)
    hook(optimizer)
    np.testing.assert_array_equal(model.W.grad, 1)
    hook.threshold = 1.0
    hook(optimizer)
    np.testing.assert_array_equal(model.W.grad, 0.5)
    assert model.b.grad is None


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_norm_that_is_no_finite_number_does_what_it_does_in_chainer(naive, wrong):
    found = []
    for hook in MultiNodeGradientClipping(1.0, naive), GradientClipping(1.0):
        model = L.Linear(2, 2)
        model.W.grad = np.full((2, 2), wrong, "f4")
        model.b.grad = np.ones(2, "f4")
        hook(chainer.optimizers.SGD().setup(model))
        found.append([model.W.grad, model.b.grad])
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("hook", "of_rule"),
    [(GradientClipping(1.0), False), (GradientLARS(), False), (GradientLARS(), True)],
)
def test_hooks_by_the_norm_of_a_part_are_refused(naive, hook, of_rule):
    """Added on one rank, the hook is an error on all ranks."""
    group = naive.split(naive.rank // 2, naive.rank)
    same_part = naive.split(naive.rank % 2, naive.rank)
    model = InParts(group)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), same_part)
    optimizer.setup(model)
    owner = model.hidden.W.update_rule if of_rule else optimizer
    if same_part.rank == 0:
        owner.add_hook(hook)
    error, text = ValueError, "chainermn.MultiNodeGradientClipping"
    if same_part.rank > 0:
        error = PeerError
    for _ in range(2):
        with pytest.raises(error, match=text):
            optimizer.update(model, batch(0, 0).astype("f4"))
    if same_part.rank == 0:
        owner.remove_hook(hook.name)
    optimizer.update(model, batch(0, 0).astype("f4"))


def test_hooks_by_norm_stay_on_models_that_ranks_hold_whole(naive):
    model = L.Linear(WIDTH, 2)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), naive)
    optimizer.setup(model)
    optimizer.add_hook(GradientClipping(1.0))
    optimizer.add_hook(GradientLARS())
    model.b.shardings = (Sharding("replica", naive),)
    optimizer.update(lambda: F.sum(model(np.ones((1, WIDTH), "f4"))))
    assert optimizer.t == 1
