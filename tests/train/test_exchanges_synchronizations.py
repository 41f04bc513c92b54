"""Ranks wait for one another once an update, whatever the exchange; no more, before data move."""

from __future__ import annotations

import chainer.functions as F
import numpy as np
import pytest
from chainer import Chain, Parameter
from chainer.optimizers import SGD

from tests.support.doubles.synchronizations import written_down
from tests.support.training.exchanges import KINDS, WHOLE_KINDS, exchanging
from tests.support.training.trainers import state_of

pytestmark = pytest.mark.world

# Updates until all is made and measured, and after it.
UNTIL_STEADY = 13
UPDATES = 3
# The node of each rank, by the number of ranks.
NODES = {2: (0, 1), 3: (0, 0, 1), 4: (0, 0, 1, 1)}


class Squares(Chain):
    """Two parameters of so many numbers, and perhaps one that no forward uses."""

    def __init__(self, size=1000, unused=None):
        super().__init__()
        with self.init_scope():
            self.a = Parameter(np.ones(size, np.float32))
            self.b = Parameter(np.ones(size, np.float32))
            self.unused = unused

    def __call__(self):
        return F.mean(self.a * self.a) + F.mean(self.b * self.b)


def without_gradient():
    return Squares(unused=Parameter(np.ones(1, np.float32)))


def without_values():
    return Squares(unused=Parameter())


def large():
    """An array of 1 MiB may go one of several ways."""
    return Squares(1 << 18)


def calls_of_updates(kind, comm, calls, model, steps=1):
    """The calls of each update, to the end of its exchange."""
    optimizer = exchanging(kind, comm, SGD(0.1), model, steps)
    found = []
    for _ in range((UNTIL_STEADY + UPDATES) * steps):
        calls.clear()
        optimizer.update(model)
        state_of(optimizer)  # waits for what is in flight
        found.append(list(calls))
    assert (model.a.array < 1).all()
    optimizer.finalize()
    return found[UNTIL_STEADY * steps :]


def assert_agreements(calls, number):
    """So many, by the thread that trains, the first one before data move."""
    agreements = [call for call in calls if call.is_agreement]
    assert len(agreements) == number, calls
    for call in agreements:
        assert not call.in_background, calls
    first = next(call for call in calls if call.moves_data or call.is_agreement)
    assert first.is_agreement, calls


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", WHOLE_KINDS)
@pytest.mark.parametrize(
    ("name", "is_over_nodes", "make"),
    [
        *[("hierarchical", False, make) for make in (Squares, large)],
        ("hierarchical", True, Squares),
        ("naive", False, Squares),
        *[("flat", False, it) for it in (Squares, without_values, without_gradient)],
    ],
)
def test_ranks_agree_once(world, kind, name, is_over_nodes, make):
    """In memory that is shared, barriers order what ranks write and read."""
    nodes = None
    if is_over_nodes:
        nodes = NODES[world.size]
    with written_down(name, nodes) as (comm, calls):
        found = calls_of_updates(kind, comm, calls, make())
    agreements = KINDS[kind].agreements
    if make is without_values:  # nothing leaves within backward
        agreements = 1
    for each in found:
        assert_agreements(each, agreements)
        moves_data = any(call.moves_data for call in each)
        barriers = sum(call.is_barrier for call in each)
        if is_over_nodes:
            assert moves_data == (nodes.index(nodes[world.rank]) == world.rank)
        elif name != "hierarchical":
            assert moves_data
            assert barriers == 0
        elif make is Squares:
            # After small terms are written, which is the agreement where gradients move
            # at once.
            assert not moves_data
            # There is no matrix that PowerSGD compresses.
            assert barriers == (kind not in ("synchronous", "PowerSGD")), each


@pytest.mark.parametrize("kind", WHOLE_KINDS)
def test_only_the_first_and_the_last_update_of_an_accumulation_agree(kind):
    with written_down("flat") as (comm, calls):
        found = calls_of_updates(kind, comm, calls, Squares(), steps=3)
    for number, each in enumerate(found):
        if number % 3 == 1:
            assert each == []
        else:
            assert_agreements(each, 1)
        if number % 3 == 0:
            for call in each:
                assert not call.moves_data
