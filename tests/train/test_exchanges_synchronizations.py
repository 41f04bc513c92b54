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

# Updates until all is made and measured, and after it.
UNTIL_STEADY, UPDATES = 13, 3
# The node of each rank, by the number of ranks.
NODES = {2: (0, 1), 3: (0, 0, 1), 4: (0, 0, 1, 1)}


class Squares(chainer.Chain):
    """Two parameters of so many numbers."""

    def __init__(self, size=1000):
        super().__init__()
        with self.init_scope():
            self.a = chainer.Parameter(np.ones(size, np.float32))
            self.b = chainer.Parameter(np.ones(size, np.float32))

    def __call__(self):
        return F.mean(self.a * self.a) + F.mean(self.b * self.b)


class Large(Squares):
    """An array of 1 MiB may go one of several ways."""

    def __init__(self):
        super().__init__(1 << 18)


class WithoutValues(Squares):
    """A layer is never used."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.late = L.Linear(None, 3)


class WithoutGradient(Squares):
    """A parameter is never used."""

    def __call__(self):
        return F.mean(self.a * self.a)


def calls_of_updates(kind, comm, calls, make=Squares, steps=1):
    """The calls of each update, to the end of its exchange."""
    model = make()
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


def moved_data(calls):
    return any(call.moves_data for call in calls)


def assert_one_agreement(kind, calls, in_backward=True):
    """By the thread that trains, before data move; one more where they may move within backward."""
    agreements = [call for call in calls if call.is_agreement]
    expected = KINDS[kind].agreements if in_backward else 1
    assert len(agreements) == expected, calls
    assert not any(call.in_background for call in agreements), calls
    first = next(call for call in calls if call.moves_data or call.is_agreement)
    assert first.is_agreement, calls


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("hierarchical", Squares),
        ("hierarchical", Large),
        ("naive", Squares),
        *(("flat", make) for make in (Squares, WithoutValues, WithoutGradient)),
    ],
)
def test_ranks_agree_once(kind, name, make):
    """In memory that is shared, barriers order what ranks write and read."""
    with written_down(name) as (comm, calls):
        found = calls_of_updates(kind, comm, calls, make)
    for each in found:
        assert_one_agreement(kind, each, in_backward=make is not WithoutValues)
        barriers = sum(call.is_barrier for call in each)
        if name != "hierarchical":
            assert moved_data(each)
            assert barriers == 0
        elif make is Squares:
            # After small terms are written, which is the agreement where gradients move
            # at once.
            assert not moved_data(each)
            assert barriers == (kind != "synchronous"), each


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_several_nodes_agree_once(world, kind):
    nodes = NODES[world.size]
    with written_down("hierarchical", nodes) as (comm, calls):
        found = calls_of_updates(kind, comm, calls)
    sends_for_its_node = nodes.index(nodes[world.rank]) == world.rank
    for each in found:
        assert_one_agreement(kind, each)
        assert moved_data(each) == sends_for_its_node


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_first_and_the_last_update_of_an_accumulation_agree(kind):
    with written_down("flat") as (comm, calls):
        found = calls_of_updates(kind, comm, calls, steps=3)
    for first, middle, last in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert_one_agreement(kind, first, in_backward=False)
        assert not moved_data(first)
        assert middle == []
        assert_one_agreement(kind, last, in_backward=False)
