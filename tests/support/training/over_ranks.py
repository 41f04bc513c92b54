"""Models that ranks train as one process does, each rank a whole one or a part; and batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import Chain, ChainList, Link, Parameter, Sequential
from numpy.random import RandomState

from chainermn_modelparallel import (
    ColumnParallelLinear,
    MultiNodeBatchNormalization,
    MultiNodeChainList,
    RowParallelLinear,
)

BATCH = 4
WIDTH = 6
HIDDEN = 5
CLASSES = 3


def batch(*place: int):
    """The examples of a rank, say, and an update's number."""
    random = RandomState(place)
    x = random.uniform(-1, 1, (BATCH, WIDTH)).astype(chainer.config.dtype)
    return x, random.randint(0, CLASSES, BATCH).astype("i4")


def joint_batch(count: int, number: int):
    """So many batches of an update, put together."""
    every = [batch(each, number) for each in range(count)]
    return [np.concatenate(parts) for parts in zip(*every, strict=True)]


def seeded(seed: int, call: Callable[..., Any], *args):
    np.random.seed(seed)
    return call(*args)


# Who holds a model with whom.


@dataclass(frozen=True)
class Place:
    """Where a rank is among the ranks that train."""

    model: Any  # communicator of the ranks that hold a model together
    mean: Any  # communicator of the ranks that take the mean of gradients
    batch: int  # which of an update's batches is this rank's
    num_batches: int  # of an update of all ranks


def whole(comm) -> Place:
    """Each rank has a model, and batches of its own."""
    return Place(comm, comm, comm.rank, comm.size)


def with_one_batch(comm) -> Place:
    """Each rank has a model, and all have the same batches."""
    return Place(comm, comm, 0, 1)


def in_groups(size: int, comm) -> Place:
    """So many ranks have a model together; they have the same batches."""
    number = comm.rank // size
    model = comm.split(number, comm.rank)
    mean = comm.split(comm.rank % size, comm.rank)
    return Place(model, mean, number, comm.size // size)


def in_pairs(comm) -> Place:
    return in_groups(2, comm)


def in_one_group(comm) -> Place:
    return in_groups(comm.size, comm)


# Models of which each rank has a whole one.


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
    """Two layers, and what comes between both."""

    def __init__(self, first, last, between=F.identity):
        super().__init__()
        with self.init_scope():
            self.first = first
            self.last = last
            self.between = between

    def __call__(self, x, t):
        h = F.tanh(self.between(self.first(x)))
        return F.softmax_cross_entropy(self.last(h), t)


def two_layers():
    return TwoLayers(L.Linear(WIDTH, HIDDEN), L.Linear(HIDDEN, CLASSES))


def lazy():
    """The weights are drawn when the model first sees examples."""
    return TwoLayers(L.Linear(None, HIDDEN), L.Linear(None, CLASSES))


def with_norm(norm):
    # A bias would have no gradient but rounding errors, which Adam makes large.
    first = L.Linear(WIDTH, HIDDEN, nobias=True)
    return TwoLayers(first, L.Linear(HIDDEN, CLASSES), norm)


# Models of which each rank has a part.


def parallel_layers(group):
    """Each rank has a part of both layers."""
    np.random.seed(0)
    return TwoLayers(
        ColumnParallelLinear(WIDTH, HIDDEN, group, gather_output=False),
        RowParallelLinear(HIDDEN, CLASSES, group, input_is_parallel=True),
    )


class Scale(Link):
    """Multiplies by its parameters."""

    def __init__(self, value):
        super().__init__()
        with self.init_scope():
            self.w = Parameter(np.full(WIDTH, value, chainer.config.dtype))

    def forward(self, x):
        return x * F.broadcast_to(self.w, x.shape)


class Scales(Chain):
    """One after another; the gradients are large of the last, if it has the smallest values."""

    def __init__(self, parts):
        super().__init__()
        with self.init_scope():
            self.parts = parts

    def __call__(self, x, t):
        y = self.parts(np.full((1, WIDTH), 128, x.dtype))
        # a delegate variable has no data
        if y.size:
            return F.sum(y)
        return y


class Columns(Chain):
    """One matrix; gradients are large of its last row, which gives the last column."""

    def __init__(self, matrix):
        super().__init__()
        with self.init_scope():
            self.matrix = matrix

    def __call__(self, x, t):
        y = self.matrix(np.ones((1, WIDTH), x.dtype))
        weights = np.ones(y.shape, x.dtype)
        weights[:, -1] = 256
        return F.sum(y * weights)


# What a rank trains, and one process.


@dataclass(frozen=True)
class Models:
    """A rank's model, and the same in one process."""

    mine: Link
    whole: Link
    held: Link  # of the whole one; has this rank's parameters by their names, uncut


def alike(make, place: Place) -> Models:
    """Each rank draws weights of its own, and rank 0's count."""
    expected = seeded(0, make)
    return Models(seeded(place.mean.rank, make), expected, expected)


def normalized(place: Place) -> Models:
    """Batch normalization by the statistics of all ranks' examples; of one process without them."""
    expected = seeded(0, with_norm, L.BatchNormalization(HIDDEN))
    norm = MultiNodeBatchNormalization(HIDDEN, place.mean, dtype=None)
    return Models(seeded(place.mean.rank, with_norm, norm), expected, expected)


def in_parts(place: Place) -> Models:
    expected = seeded(0, two_layers)
    return Models(parallel_layers(place.model), expected, expected)


def placed(place: Place) -> Models:
    """A link a rank; the last one's gradients are 64 times larger than the others'."""
    comm = place.model
    here = comm.rank
    before = None
    if here > 0:
        before = here - 1
    after = None
    if here + 1 < comm.size:
        after = here + 1
    values = [1] * (comm.size - 1) + [1 / 64]
    mine = MultiNodeChainList(comm)
    mine.add_link(Scale(values[here]), before, after)
    expected = [Scale(value) for value in values]
    return Models(
        Scales(mine), Scales(Sequential(*expected)), Scales(ChainList(expected[here]))
    )


def in_columns(place: Place) -> Models:
    """The last rank has the large gradients."""
    size = 2 * place.model.size
    expected = Columns(seeded(0, L.Linear, WIDTH, size))
    mine = Columns(seeded(0, ColumnParallelLinear, WIDTH, size, place.model))
    return Models(mine, expected, expected)
