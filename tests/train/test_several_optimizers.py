"""Optimizers of one communicator are told apart, though their models look alike."""

from __future__ import annotations

import re
from copy import copy, deepcopy

import pytest
from chainer.optimizers import SGD

from chainermn_comm import RankMismatchError
from tests.support.training.exchanges import KINDS, exchanging, states
from tests.support.training.small_models import Model, update
from tests.support.training.trainers import parameter_bits, same_everywhere

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]

of_each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def fresh(comm):
    """A communicator of a test's own, where numbers begin with 1."""
    own = comm.split(0, comm.rank)
    yield own
    own.finalize()


def made(comm, kind="synchronous"):
    """With weights of its own; a common seed would hide that gradients are confused."""
    return exchanging(kind, comm, SGD(0.1), Model(comm.rank), 1)


# What one rank takes in place of the optimizer: made on all ranks, or on that one alone.
OTHERS = {
    "the other one of two": (lambda optimizer: made(optimizer.communicator), True),
    "that of the next trial": (lambda optimizer: made(optimizer.communicator), False),
    "a copy": (copy, False),
    "a deep copy": (deepcopy, False),
}
CALLS = {
    "update": update,
    "flush": lambda optimizer: optimizer.flush(),
    "synchronize": lambda optimizer: optimizer.synchronize(),
    "finalize": lambda optimizer: optimizer.finalize(),
}


@of_each_kind
@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize("updates", [0, 3])
@pytest.mark.parametrize(
    ("other", "call"),
    [
        *[(other, "update") for other in OTHERS],
        *[("a deep copy", call) for call in CALLS],
    ],
)
def test_another_one_on_one_rank_is_refused_on_all(
    fresh, kind, where, updates, other, call
):
    optimizer = made(fresh, kind)
    update(optimizer, updates)
    kept = states(optimizer)
    make, is_on_all = OTHERS[other]
    odd = where % fresh.size
    mine = optimizer
    if is_on_all or fresh.rank == odd:
        another = make(optimizer)
    if fresh.rank == odd:
        mine = another
    with pytest.raises(RankMismatchError) as raised:
        CALLS[call](mine)
    found = re.search(
        r"disagree on optimizer, by creation: (.*) on ranks? ([\d, ]+); (.*) on ranks? ([\d, ]+)",
        str(raised.value),
    )
    assert found, raised.value
    named = {found[2]: found[1], found[4].rstrip(", "): found[3]}
    assert named.pop(str(odd)) == "number 2 (SGD)"
    assert [*named.values()] == ["number 1 (SGD)"]
    assert states(optimizer) == kept
    update(optimizer, 2)  # with the same one all go on
    assert same_everywhere(fresh, optimizer.target)
    optimizer.finalize()


@of_each_kind
def test_copies_on_all_ranks_train(fresh, kind):
    optimizer = made(fresh, kind)
    update(optimizer, 3)
    twin = deepcopy(optimizer)
    for each in optimizer, twin, optimizer, twin:
        update(each, 2)
    assert parameter_bits(twin.target) == parameter_bits(optimizer.target)
    for each in optimizer, twin:
        assert same_everywhere(fresh, each.target)
        each.finalize()


def test_numbers_are_a_communicators_own(naive):
    """What a rank makes on another one doesn't count."""
    with naive.split(naive.rank, 0) as alone, naive.split(0, naive.rank) as again:
        for _ in range(naive.rank):
            update(made(alone), 2)
        pair = [made(naive), made(again)]
        for each in pair:
            update(each, 3)
            assert same_everywhere(naive, each.target)
