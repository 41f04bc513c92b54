"""However gradients are exchanged, ranks train as one process does with all their examples."""

from __future__ import annotations

from functools import partial

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Chain, Sequential
from chainer.optimizer_hooks import GradientClipping, WeightDecay
from chainer.optimizers import SGD, Adam
from numpy.random import RandomState

from chainermn_modelparallel import MultiNodeBatchNormalization
from tests.support.plugins.pairwise import pairwise
from tests.support.training.exchanges import (
    HIERARCHICAL,
    KINDS,
    OneProcess,
    exchanging,
)
from tests.support.training.trainers import (
    assert_near,
    parameter_bits,
    same_everywhere,
)

pytestmark = pytest.mark.world

UPDATES = 20
BATCH = 4
WIDTH = 6
CLASSES = 3
TOLERANCE = 1e-10

each_kind = pytest.mark.parametrize("kind", KINDS)


# Models.


class Tied(Chain):
    """One weight has two paths, and lies in two links; another link is not used at all."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.encoder = L.Linear(WIDTH, WIDTH)
            self.decoder = L.Linear(WIDTH, WIDTH)
            self.unused = L.Linear(WIDTH, 2)
        self.decoder.W = self.encoder.W

    def __call__(self, x, t):
        return F.mean_squared_error(self.decoder(F.tanh(self.encoder(x))), x)


class TwoLayers(Chain):
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


# What happens to a model on all ranks.


def tie(model):
    model.decoder.b = model.encoder.b


def freeze(model):
    model.encoder.disable_update()


def thaw(model):
    model.encoder.enable_update()


# A model, and the changes before updates 6 and 12.
CASES = {
    "tied": [Tied],
    "tied later": [Tied, tie],
    "normalized": [normalized],
    "lazy": [lazy],
    "frozen and thawed": [Tied, freeze, thaw],
}


# Training.


def batch(rank, number):
    random = RandomState((rank, number))
    x = random.uniform(-1, 1, (BATCH, WIDTH)).astype(chainer.config.dtype)
    return x, random.randint(0, CLASSES, BATCH).astype("i4")


def joint(size, number):
    """The batches of all ranks, put together."""
    every = [batch(rank, number) for rank in range(size)]
    return [np.concatenate(parts) for parts in zip(*every, strict=True)]


def seeded(seed, call, *args):
    np.random.seed(seed)
    return call(*args)


@pairwise(kind=KINDS, name=CASES, steps=[1, 3])
def test_ranks_train_as_one_process_does(comm, kind, name, steps, double_precision):
    """And have the same bits after every update, whatever the paths to a parameter."""
    make, *changes = CASES[name]
    expected = seeded(0, make)
    if make is normalized:
        make = partial(normalized, comm)
    mine = seeded(comm.rank, make)
    make_optimizer = partial(Adam, alpha=0.01)
    many = exchanging(kind, comm, make_optimizer(), mine, steps)
    actual = make_optimizer().setup(expected)
    single = OneProcess(kind, actual, steps)
    if not changes:  # one process's hooks see the gradients of what is not updated
        for each in many, actual:
            each.add_hook(WeightDecay(1e-2))
            each.add_hook(GradientClipping(0.1))  # less than any gradient's norm
    if make is lazy:
        # Each rank draws weights, rank 0's are taken, and nobody steps.
        examples = batch(comm.rank, UPDATES)
        seeded(comm.rank, many.update, mine, *examples)
        seeded(0, expected, *examples)
        assert parameter_bits(mine) == parameter_bits(expected)
    for number in range(UPDATES):
        if changes and number in (6, 12):
            many.flush()  # gradients in flight would be dropped
            single.flush()
            change = changes.pop(0)
            change(mine)
            change(expected)
        many.update(mine, *batch(comm.rank, number))
        single.update(*joint(comm.size, number))
        assert many.t == actual.t
        assert same_everywhere(comm, mine)
        assert_near(mine, expected, TOLERANCE)
    many.flush()
    single.flush()
    assert many.t == actual.t
    assert_near(mine, expected, TOLERANCE)
    many.finalize()


@HIERARCHICAL
@each_kind
def test_hooks_see_zeros_for_what_is_not_updated(comm, kind):
    """Its gradients stay on their rank."""
    model = Tied()
    optimizer = exchanging(kind, comm, SGD(0.2), model)
    seen = []

    def look(_):
        seen.append(model.encoder.W.grad.any())

    optimizer.add_hook(look, "look")
    freeze(model)
    for number in range(4):
        optimizer.update(model, *batch(comm.rank, number))
    assert set(seen) == {False}
    optimizer.finalize()


@HIERARCHICAL
@each_kind
@pytest.mark.parametrize("steps", [1, 3])
def test_parameters_hold_gradients_after_every_update(comm, kind, steps):
    """Extensions such as ParameterStatistics look at these."""
    model = lazy()
    optimizer = exchanging(kind, comm, SGD(lr=0.1), model, steps)
    for number in range(7):
        optimizer.update(model, *batch(comm.rank, number))
        for name, param in model.namedparams():
            assert param.grad.any(), (number, name)
    optimizer.finalize()


@pytest.mark.sizes(2, 3, 4)
def test_a_lazy_batch_normalization_does_not_begin_anew_where_examples_come_later(
    naive,
):
    """Chainer's makes its parameters anew when it makes its statistics."""
    norm = L.BatchNormalization(axis=0)
    model = L.Classifier(Sequential(norm, L.Linear(WIDTH, CLASSES)))
    optimizer = exchanging("synchronous", naive, SGD(0.1), model)
    if naive.rank == 0:
        norm(np.ones((2, WIDTH), np.float32))
        norm.gamma.array[:] = 3
    naive.bcast_data(model)  # brings no statistics
    for number in range(6):
        model.cleargrads()
        if naive.rank == 0 or number > 2:
            model(*batch(0, number)).backward()
        optimizer.update()
        assert norm.avg_mean.shape == norm.avg_var.shape == (WIDTH,)
        assert same_everywhere(naive, model)
    # All go on together from what was given.
    assert np.abs(norm.gamma.array - 3).max() < 0.5
