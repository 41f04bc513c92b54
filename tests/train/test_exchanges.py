"""However gradients are exchanged, ranks train as one process does with all their examples."""

from __future__ import annotations

import copy
from functools import partial

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.optimizer_hooks import GradientClipping, WeightDecay

from chainermn_comm import RankMismatchError
from chainermn_modelparallel import MultiNodeBatchNormalization
from tests.support.plugins.pairwise import pairwise
from tests.support.training.exchanges import (
    HIERARCHICAL,
    KINDS,
    OneProcess,
    exchanging,
    states,
)
from tests.support.training.trainers import (
    assert_near,
    parameter_bits,
    same_everywhere,
)
from tests.support.worlds.third_party import PlainCommunicator

pytestmark = pytest.mark.world

UPDATES = 20
BATCH = 4
WIDTH = 6
CLASSES = 3
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}

each_kind = pytest.mark.parametrize("kind", KINDS)


# Models.


class Tied(chainer.Chain):
    """One weight has two paths, and lies in two links."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.encoder = L.Linear(WIDTH, WIDTH)
            self.decoder = L.Linear(WIDTH, WIDTH)
        self.decoder.W = self.encoder.W

    def __call__(self, x, t):
        return F.mean_squared_error(self.decoder(F.tanh(self.encoder(x))), x)


class TwoLayers(chainer.Chain):
    """A first layer, and what comes between both."""

    def __init__(self, first, between=F.identity):
        super().__init__()
        with self.init_scope():
            self.first = first
            self.last = L.Linear(None if first.W.array is None else 5, CLASSES)
            self.between = between

    def __call__(self, x, t):
        h = F.tanh(self.between(self.first(x)))
        return F.softmax_cross_entropy(self.last(h), t)


def normalized(comm=None):
    """Batch normalization by the statistics of all ranks' examples; of one process without them."""
    norm = L.BatchNormalization(5)
    if comm is not None:
        norm = MultiNodeBatchNormalization(5, comm, dtype=None)
    # A bias would have no gradient but rounding errors, which Adam makes large.
    return TwoLayers(L.Linear(WIDTH, 5, nobias=True), norm)


def lazy():
    """The weights are drawn when the model first sees examples."""
    return TwoLayers(L.Linear(None, 5))


class Uneven(chainer.Chain):
    """A link that is used twice, and one that is not used at all."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.twice = L.Linear(WIDTH, WIDTH)
            self.unused = L.Linear(WIDTH, 2)
            self.last = L.Linear(WIDTH, CLASSES)

    def __call__(self, x, t):
        h = F.tanh(self.twice(F.tanh(self.twice(x))))
        return F.softmax_cross_entropy(self.last(h), t)


MODELS = {
    "tied": Tied,
    "normalized": normalized,
    "lazy": lazy,
    "uneven": Uneven,
}
OPTIMIZERS = {
    "sgd": partial(chainer.optimizers.SGD, lr=0.2),
    "momentum": partial(chainer.optimizers.MomentumSGD, lr=0.2),
    "adam": partial(chainer.optimizers.Adam, alpha=0.01),
}
# Updates of a step, and loss scales that are set in turn, one before each update.
CONDITIONS = {
    "each": (1, ()),
    "of three": (3, ()),
    "scaled": (1, (64.0,)),
    "rescaled": (3, (8.0, 512.0, 0.25, 64.0)),
}


# Training.


def batch(rank, number):
    random = np.random.RandomState((rank, number))
    x = random.uniform(-1, 1, (BATCH, WIDTH)).astype(chainer.config.dtype)
    return x, random.randint(0, CLASSES, BATCH).astype("i4")


def joint(ranks, number):
    """The batches of these ranks, put together."""
    every = [batch(rank, number) for rank in ranks]
    return [np.concatenate(parts) for parts in zip(*every, strict=True)]


def seeded(seed, call, *args):
    np.random.seed(seed)
    return call(*args)


class Beside:
    """Ranks that train beside one process, with which they are compared after each update."""

    def __init__(self, comm, kind, make, optimizer="momentum", steps=1):
        self.comm = comm
        per_rank = make
        if make is normalized:
            per_rank = partial(make, comm)
        self.mine = seeded(comm.rank, per_rank)
        self.expected = seeded(0, make)
        make_optimizer = OPTIMIZERS[optimizer]
        self.many = exchanging(kind, comm, make_optimizer(), self.mine, steps)
        self.actual = make_optimizer().setup(self.expected)
        self.single = OneProcess(kind, self.actual, steps)

    def update(self, number):
        self.many.update(self.mine, *batch(self.comm.rank, number))
        self.single.update(*joint(range(self.comm.size), number))
        self.assert_equal()

    def initialize(self):
        """Each rank draws weights, rank 0's are taken, and nobody steps."""
        examples = batch(self.comm.rank, UPDATES)
        seeded(self.comm.rank, self.many.update, self.mine, *examples)
        seeded(0, self.expected, *examples)
        assert parameter_bits(self.mine) == parameter_bits(self.expected)

    def flush(self):
        self.many.flush()
        self.single.flush()
        self.assert_equal()

    def assert_equal(self):
        assert self.many.t == self.actual.t
        assert same_everywhere(self.comm, self.mine)
        tolerance = TOLERANCES[np.dtype(chainer.config.dtype).name]
        assert_near(self.mine, self.expected, tolerance)


@pairwise(
    kind=KINDS,
    model=MODELS,
    optimizer=OPTIMIZERS,
    condition=CONDITIONS,
    dtype=TOLERANCES,
)
def test_ranks_train_as_one_process_does(
    comm, kind, model, optimizer, condition, dtype
):
    """And have the same bits after every update, whatever the paths to a parameter."""
    steps, scales = CONDITIONS[condition]
    # A third party's zeros for what no rank uses are scaled, and one process's are not.
    unlike = scales and model == "uneven" and isinstance(comm, PlainCommunicator)
    with chainer.using_config("dtype", np.dtype(dtype)):
        both = Beside(comm, kind, MODELS[model], optimizer, steps)
        if condition == "scaled":
            both.actual.set_loss_scale(*scales)
        if condition != "rescaled" and not unlike:
            for each in both.many, both.actual:
                each.add_hook(WeightDecay(1e-2))
                each.add_hook(GradientClipping(0.1))  # less than any gradient's norm
        if model == "lazy":
            both.initialize()
        for number in range(UPDATES):
            # Chainer undoes the scale of tied weights twice.
            if scales and (model != "tied" or condition == "scaled"):
                both.many.set_loss_scale(scales[number % len(scales)])
            both.update(number)
            assert both.many.t == max(0, (number + 1) // steps - KINDS[kind].delay)
        both.flush()
        assert both.many.t == -(-UPDATES // steps)
        both.many.finalize()


def tie(model):
    model.decoder.b = model.encoder.b


def freeze(model):
    model.twice.disable_update()


def thaw(model):
    model.twice.enable_update()


@HIERARCHICAL
@each_kind
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("changes", [(Tied, tie), (Uneven, freeze, thaw)])
def test_a_change_of_all_ranks_is_that_of_one_process(
    comm, kind, steps, changes, double_precision
):
    make, *changes = changes
    both = Beside(comm, kind, make, steps=steps)
    for number in range(UPDATES):
        if changes and number in (6, 12):
            both.flush()  # what is in flight would be dropped
            change = changes.pop(0)
            change(both.mine)
            change(both.expected)
        both.update(number)
    both.flush()
    both.many.finalize()


@HIERARCHICAL
@each_kind
def test_hooks_see_zeros_for_what_is_not_updated(comm, kind):
    """Its gradients stay on their rank."""
    model = Uneven()
    optimizer = exchanging(kind, comm, chainer.optimizers.SGD(0.2), model)
    seen = []
    optimizer.add_hook(lambda _: seen.append(model.twice.W.grad.any()), "look")
    for change in thaw, freeze:
        change(model)
        optimizer.flush()
        seen.clear()
        for number in range(4):
            optimizer.update(model, *batch(comm.rank, number))
        assert seen
        assert set(seen) == {change is thaw}
    optimizer.finalize()


@HIERARCHICAL
@each_kind
@pytest.mark.parametrize("steps", [1, 3])
def test_parameters_hold_gradients_after_every_update(comm, kind, steps):
    """Extensions such as ParameterStatistics look at these."""
    model = lazy()
    optimizer = exchanging(kind, comm, chainer.optimizers.SGD(lr=0.1), model, steps)
    for number in range(7):
        optimizer.update(model, *batch(comm.rank, number))
        for name, param in model.namedparams():
            assert param.grad.any(), (number, name)
    optimizer.finalize()


@HIERARCHICAL
@each_kind
@pytest.mark.parametrize("steps", [1, 3])
def test_a_copy_goes_its_own_way_with_what_it_has_added_up(comm, kind, steps):
    """And with the same communicator, at the same time, longer than the original does."""

    def fresh():
        model = seeded(0, Tied)
        return exchanging(kind, comm, chainer.optimizers.Adam(), model, steps)

    original, expected = fresh(), fresh()
    both = [original, expected]
    for number in range(9):
        if number == 5:
            both.append(copy.deepcopy(original))
        for each in both:
            each.update(each.target, *batch(comm.rank, number))
    for each in both:
        assert each.communicator is comm
        each.flush()
        each.finalize()
        assert states(each) == states(original)


# What ranks don't have alike.


@pytest.mark.sizes(2, 3, 4)
@HIERARCHICAL
@each_kind
@pytest.mark.parametrize("where", [0, -1])
def test_without_zero_fill_a_gradient_that_some_ranks_lack_is_named(comm, kind, where):
    """All raise then, and nobody steps."""
    model = Uneven()
    sgd = chainer.optimizers.SGD(lr=0.5)
    optimizer = exchanging(kind, comm, sgd, model, zero_fill=False)
    examples = batch(comm.rank, 0)
    for _ in range(4):
        optimizer.update(model, *examples)
    optimizer.flush()
    before = parameter_bits(model)
    loss = model
    if comm.rank == where % comm.size:
        loss = lambda x, _: F.sum(model.last(x))  # noqa: E731
    with pytest.raises(RankMismatchError, match="/twice/W"):
        optimizer.update(loss, *examples)
    assert parameter_bits(model) == before
    optimizer.update(model, *examples)
    optimizer.flush()
    assert optimizer.t == 5
    assert same_everywhere(comm, model)
    optimizer.finalize()


@pytest.mark.sizes(2, 3, 4)
def test_a_lazy_batch_normalization_does_not_begin_anew_where_examples_come_later(
    naive,
):
    """Chainer's makes its parameters anew when it makes its statistics."""
    norm = L.BatchNormalization(axis=0)
    model = L.Classifier(chainer.Sequential(norm, L.Linear(WIDTH, CLASSES)))
    sgd = chainer.optimizers.SGD(lr=0.1)
    optimizer = exchanging("synchronous", naive, sgd, model)
    if naive.rank == 0:
        norm(np.ones((2, WIDTH), np.float32))
        norm.gamma.array[:] = 3
    naive.bcast_data(model)  # brings no statistics
    for number in range(6):
        if naive.rank > 0 and number < 3:
            model.cleargrads()
            optimizer.update()
        else:
            optimizer.update(model, *batch(0, number))
        assert norm.avg_mean.shape == norm.avg_var.shape == (WIDTH,)
        assert same_everywhere(naive, model)
    # All go on together from what was given.
    assert np.abs(norm.gamma.array - 3).max() < 0.5
