"""Any sequence of updates, failures, flushes and snapshots does what plain arithmetic says."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import chainer
import chainer.functions as F
import numpy as np
import pytest

from chainermn_comm import PeerError
from chainermn_train import create_multi_node_optimizer
from tests.support.plugins.pairwise import pairwise
from tests.support.training.trainers import load_state, state_of

pytestmark = pytest.mark.world

RATE, WIDTH = 0.05, 3


class PlantedError(BaseException):
    """As an interrupt."""


class Model(chainer.Link):
    def __init__(self, seed):
        super().__init__()
        with self.init_scope():
            self.p = chainer.Parameter(start(seed))


def start(seed):
    return np.random.RandomState(seed).uniform(size=WIDTH)


def coefficients(rank, number):
    """The gradient of a rank's batch is a * p + b: it tells how old the parameters were."""
    return np.random.RandomState((rank, number)).uniform(-1, 1, (2, WIDTH))


@dataclass
class Expected:
    """What all ranks together should do, in one process and NumPy alone."""

    size: int
    double_buffering: bool
    steps: int
    p: np.ndarray = field(default_factory=lambda: start(0))
    t: int = 0
    calls: int = 0
    terms: int = 0
    total: np.ndarray = field(default_factory=lambda: np.zeros(WIDTH))
    in_flight: np.ndarray | None = None

    @property
    def is_collective(self) -> bool:
        return self.calls in (0, self.steps - 1)

    def update(self, number, failing, without_gradients):
        if failing and self.is_collective:
            return  # on all ranks, which may try another batch
        for rank in set(range(self.size)) - failing:
            a, b = coefficients(rank, number)
            if rank not in without_gradients:
                self.total = self.total + a * self.p + b
            self.terms += 1
        self.calls += 1
        if self.calls == self.steps:
            self.exchange()

    def flush(self):
        if self.in_flight is not None:
            self.step(self.in_flight)
            self.in_flight = None
        if self.terms:
            self.exchange()
            if self.double_buffering:
                self.flush()
        self.end_group()

    def exchange(self):
        mean = self.total / max(self.terms, 1)
        self.end_group()
        if self.double_buffering:
            mean, self.in_flight = self.in_flight, mean
        if mean is not None:
            self.step(mean)

    def end_group(self):
        self.total, self.calls, self.terms = np.zeros(WIDTH), 0, 0

    def step(self, mean):
        self.p = self.p - RATE * mean
        self.t += 1


def optimizer_of(comm, model, scaling, **kwds):
    actual = chainer.optimizers.SGD(RATE)
    if scaling == "dynamic":
        actual.loss_scaling(interval=2, scale=16.0)
    elif scaling is not None:
        actual.set_loss_scale(scaling)
    return create_multi_node_optimizer(actual, comm, **kwds).setup(model)


def restored(comm, optimizer, *settings, **kwds):
    """Another optimizer and model, with the state of these."""
    twin = optimizer_of(comm, Model(comm.rank + 50), *settings, **kwds)
    for one, other in (optimizer.target, twin.target), (optimizer, twin):
        load_state(other, state_of(one))
    twin.assume_synchronized()
    optimizer.finalize()
    return twin


def update(comm, optimizer, number, failing, without_gradients, is_collective):
    """An update of this rank, which fails as it should."""

    def loss():
        if comm.rank in failing:
            raise PlantedError
        if comm.rank in without_gradients:
            return SimpleNamespace(backward=lambda **_: None)  # it meets no parameter
        a, b = coefficients(comm.rank, number)
        p = optimizer.target.p
        return F.sum(p * p * a / 2 + p * b)

    if comm.rank in failing or (failing and is_collective):
        with pytest.raises(PlantedError if comm.rank in failing else PeerError):
            optimizer.update(loss)
    else:
        optimizer.update(loss)


def play(comm, seed, double_buffering, steps, scaling):
    """A random sequence, the same on all ranks; parameters are compared after each move."""
    draw = random.Random(f"{seed}, {double_buffering}, {steps}, {scaling}")
    kwds = {"double_buffering": double_buffering, "accumulate_steps": steps}
    optimizer = optimizer_of(comm, Model(comm.rank), scaling, **kwds)
    expected = Expected(comm.size, *kwds.values())
    kinds = {"update": 5, "fail": 2, "lack": 1, "flush": 1, "save": 1}
    moves = ["update", *draw.choices(list(kinds), list(kinds.values()), k=13)]
    for number, move in enumerate(moves):
        if move == "flush":
            optimizer.flush()
            expected.flush()
        elif move == "save":
            optimizer = restored(comm, optimizer, scaling, **kwds)
        else:
            some = set(draw.sample(range(comm.size), draw.randint(1, comm.size)))
            failing, lacking = (
                some if move == each else set() for each in ("fail", "lack")
            )
            update(comm, optimizer, number, failing, lacking, expected.is_collective)
            expected.update(number, failing, lacking)
        told = f"seed {seed}, {kwds}, loss scale {scaling}: {moves[: number + 1]}"
        assert optimizer.t == expected.t, told
        np.testing.assert_allclose(
            optimizer.target.p.array, expected.p, rtol=1e-9, err_msg=told
        )
    optimizer.flush()
    expected.flush()
    np.testing.assert_allclose(optimizer.target.p.array, expected.p, rtol=1e-9)
    optimizer.finalize()


each_kind = pairwise(
    double_buffering=[False, True], steps=[1, 2, 3, 4], scaling=[None, 8.0, "dynamic"]
)


@each_kind
def test_random_sequences(comm, double_buffering, steps, scaling):
    play(comm, 0, double_buffering, steps, scaling)


@pytest.mark.full
@each_kind
def test_many_random_sequences(every, double_buffering, steps, scaling):
    for seed in 100, 101:
        play(every, seed, double_buffering, steps, scaling)
