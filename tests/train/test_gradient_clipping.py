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


@pytest.mark.parametrize("is_multi_node", [False, True])
def test_parameters_follow_one_process(naive, double_precision, is_multi_node):
    """Two ranks have a model; on four ranks, two pairs train with examples of their own."""
    copy = naive.rank // 2
    group = naive.split(copy, naive.rank)
    model = InParts(group)
    optimizer = chainer.optimizers.MomentumSGD(0.5)
    copies = [copy]
    comm = group
    if is_multi_node:
        same_part = naive.split(naive.rank % 2, naive.rank)
        optimizer = create_multi_node_optimizer(optimizer, same_part)
        copies = range(naive.size // 2)
        comm = naive
    optimizer.setup(model).add_hook(MultiNodeGradientClipping(THRESHOLD, comm))
    whole = Whole()
    expected = chainer.optimizers.MomentumSGD(0.5).setup(whole)
    expected.add_hook(GradientClipping(THRESHOLD))
    for number in range(UPDATES):
        optimizer.update(model, batch(copy, number))
        examples = [batch(each, number) for each in copies]
        expected.update(whole, np.concatenate(examples))
    rows = np.array_split(np.arange(WIDTH), 2)[group.rank]
    for part, array in (
        (model.hidden.W, whole.hidden.W.array[rows]),
        (model.hidden.b, whole.hidden.b.array[rows]),
        (model.output.W, whole.output.W.array[:, rows]),
        (model.output.b, whole.output.b.array),
    ):
        np.testing.assert_allclose(part.array, array, rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("value", [0.1, 1, np.nan, np.inf])
def test_gradients_of_a_whole_model_are_what_chainer_makes_of_them(naive, value):
    """Also where the norm is below the threshold, or no finite number."""
    found = []
    for hook in GradientClipping(1.0), MultiNodeGradientClipping(1.0, naive):
        model = L.Linear(2, 2)
        optimizer = chainer.optimizers.SGD().setup(model)
        model.W.grad = np.full((2, 2), value, "f4")
        model.b.grad = np.full(2, 0.1, "f4")
        hook(optimizer)
        found.append([*model.W.grad, model.b.grad])
    np.testing.assert_allclose(*found, rtol=1e-6)
    model.cleargrads()
    hook(optimizer)
    assert model.W.grad is None


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
