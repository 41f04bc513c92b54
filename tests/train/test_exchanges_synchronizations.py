"""Ranks wait for one another once an update, whatever the exchange; no more, before data move."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from tests.support.doubles.synchronizations import written_down
from tests.support.training.exchanges import KINDS, exchanging
from tests.support.training.trainers import state_of

pytestmark = pytest.mark.world

# Float32 numbers of a parameter; from 1 MiB on an array may go one of several ways.
SMALL, LARGE = 1000, 1 << 18
# Updates until all is made and measured, and after it.
UNTIL_STEADY, UPDATES = 13, 3
# The node of each rank, by the number of ranks.
NODES = {2: (0, 1), 3: (0, 0, 1), 4: (0, 0, 1, 1)}


class Squares(chainer.Chain):
    """Two parameters of so many numbers."""

    def __init__(self, size):
        super().__init__()
        with self.init_scope():
            self.a = chainer.Parameter(np.ones(size, np.float32))
            self.b = chainer.Parameter(np.ones(size, np.float32))

    def __call__(self):
        return F.mean(self.a * self.a) + F.mean(self.b * self.b)


class WithoutValues(Squares):
    """A layer is never used."""

    def __init__(self, size):
        super().__init__(size)
        with self.init_scope():
            self.late = L.Linear(None, 3)


class WithoutGradient(Squares):
    """A parameter is never used."""

    def __call__(self):
        return F.mean(self.a * self.a)


def calls_of_updates(kind, comm, calls, size=SMALL, steps=1, make=Squares):
    """The calls of each update, to the end of its exchange."""
    model = make(size)
    optimizer = exchanging(kind, comm, chainer.optimizers.SGD(0.1), model, steps)
    found = []
    for _ in range((UNTIL_STEADY + UPDATES) * steps):
        calls.clear()
        optimizer.update(model)
        state_of(optimizer)  # waits for what is in flight
        found.append(list(calls))
    assert (model.a.array < 1).all()
    optimizer.finalize()
    return found[UNTIL_STEADY * steps :]


def agreements(calls):
    return [call for call in calls if call.is_agreement]


def moved_data(calls):
    return any(call.moves_data for call in calls)


def before_data(calls):
    """The calls before the first that moves gradients."""
    numbers = [number for number, call in enumerate(calls) if call.moves_data]
    return calls[: min(numbers, default=None)]


def assert_one_agreement(kind, calls, in_backward=True):
    """By the thread that trains, before data move; one more where they may move within backward."""
    expected = [False] * (KINDS[kind].agreements if in_backward else 1)
    assert [call.in_background for call in agreements(calls)] == expected, calls
    assert agreements(before_data(calls)), calls


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_where_memory_is_shared_small_gradients_take_one_barrier(kind):
    """After the terms are written; that is the agreement where gradients move at once."""
    barriers = 1
    if kind == "synchronous":
        barriers = 0
    with written_down("hierarchical") as (comm, calls):
        found = calls_of_updates(kind, comm, calls)
    for each in found:
        assert_one_agreement(kind, each)
        assert sum(call.is_barrier for call in each) == barriers, each
        assert not moved_data(each)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["flat", "naive"])
def test_before_messages_there_is_one_agreement(kind, name):
    with written_down(name) as (comm, calls):
        found = calls_of_updates(kind, comm, calls)
    for each in found:
        assert_one_agreement(kind, each)
        assert moved_data(each)
        assert not any(call.is_barrier for call in each)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [WithoutValues, WithoutGradient])
def test_parameters_without_values_or_gradients_take_no_other(kind, make):
    with written_down("flat") as (comm, calls):
        found = calls_of_updates(kind, comm, calls, make=make)
    for each in found:
        assert_one_agreement(kind, each, in_backward=make is not WithoutValues)
        assert moved_data(each)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_before_messages_between_nodes_there_is_one_agreement(world, kind):
    """Barriers order what the ranks of a node write and read."""
    with written_down("hierarchical", NODES[world.size]) as (comm, calls):
        found = calls_of_updates(kind, comm, calls)
    for each in found:
        assert_one_agreement(kind, each)
    # For its node.
    sends = NODES[world.size].index(NODES[world.size][world.rank]) == world.rank
    assert [moved_data(each) for each in found] == [sends] * UPDATES


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_first_and_the_last_update_of_a_group_agree(kind):
    with written_down("flat") as (comm, calls):
        found = calls_of_updates(kind, comm, calls, steps=3)
    for first, middle, last in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert_one_agreement(kind, first, in_backward=False)
        assert not moved_data(first)
        assert middle == []
        assert_one_agreement(kind, last, in_backward=False)


@pytest.mark.parametrize("kind", KINDS)
def test_before_large_arrays_there_is_one_agreement(kind):
    with written_down("hierarchical") as (comm, calls):
        found = calls_of_updates(kind, comm, calls, LARGE)
    for each in found:
        assert_one_agreement(kind, each)
