"""Optimizers of one communicator are told apart, though their models look alike."""

from __future__ import annotations

import copy
import re

import chainer
import pytest

from chainermn_comm import RankMismatchError
from tests.support.training.exchanges import KINDS, exchanging, states
from tests.support.training.linear import Model, update
from tests.support.training.trainers import parameter_bits, same_everywhere

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]

of_each_kind = pytest.mark.parametrize("kind", KINDS)
on_each_rank = pytest.mark.parametrize("where", [0, -1])


@pytest.fixture
def fresh(comm):
    """A communicator of a test's own, where numbers begin with 1."""
    own = comm.split(0, comm.rank)
    yield own
    own.finalize()


def made(comm, kind="synchronous", steps=1):
    """With weights of its own; a common seed would hide that gradients are confused."""
    return exchanging(kind, comm, chainer.optimizers.SGD(0.1), Model(comm.rank), steps)


def assert_refused(comm, call, where, names):
    """All ranks raise, and name both optimizers, the first of them that of all others."""
    with pytest.raises(RankMismatchError) as raised:
        call()
    found = re.search(
        r"disagree on optimizer, by creation: (.*) on (ranks? [\d, ]+); (.*) on (ranks? [\d, ]+)",
        str(raised.value),
    )
    assert found, raised.value
    alone = f"rank {where % comm.size}"
    by_ranks = {found[2]: found[1], found[4].rstrip(", "): found[3]}
    assert by_ranks.pop(alone) == names[1]
    assert [*by_ranks.values()] == names[:1]


@of_each_kind
@on_each_rank
@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.ci)])
@pytest.mark.parametrize("updates", [0, 2])
def test_another_order_on_one_rank_is_refused_on_all(
    fresh, kind, where, steps, updates
):
    pair = [made(fresh, kind, steps) for _ in range(2)]
    for each in pair:
        update(each, updates * steps)
    before = [each.t for each in pair]
    own = pair[::-1] if fresh.rank == where % fresh.size else pair
    numbers = [f"number {each} (SGD)" for each in (1, 2)]
    assert_refused(fresh, lambda: update(own[0], steps), where, numbers)
    assert [each.t for each in pair] == before
    for each in pair:  # in the same order all go on
        update(each, 3 * steps)
        assert same_everywhere(fresh, each.target)
        each.finalize()


@of_each_kind
@on_each_rank
def test_the_next_trial_on_one_rank_alone_is_refused_on_all(fresh, kind, where):
    optimizer = made(fresh, kind)
    update(optimizer, 3)
    kept, mine = states(optimizer), optimizer
    if fresh.rank == where % fresh.size:
        mine = made(fresh, kind)
    numbers = [f"number {each} (SGD)" for each in (1, 2)]
    assert_refused(fresh, lambda: update(mine), where, numbers)
    assert states(optimizer) == kept
    update(optimizer, 2)
    assert same_everywhere(fresh, optimizer.target)
    optimizer.finalize()


@of_each_kind
@on_each_rank
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_on_one_rank_alone_is_another_one(fresh, kind, where, duplicate):
    optimizer = made(fresh, kind)
    update(optimizer, 3)
    is_alone = fresh.rank == where % fresh.size
    mine = duplicate(optimizer) if is_alone else optimizer
    numbers = ["number 1 (SGD)", "number 2 (SGD)"]
    assert_refused(fresh, lambda: update(mine), where, numbers)
    update(optimizer, 2)
    assert same_everywhere(fresh, optimizer.target)
    optimizer.finalize()


@of_each_kind
def test_copies_on_all_ranks_train(fresh, kind):
    optimizer = made(fresh, kind)
    update(optimizer, 3)
    twin = copy.deepcopy(optimizer)
    for each in optimizer, twin, optimizer, twin:
        update(each, 2)
    assert parameter_bits(twin.target) == parameter_bits(optimizer.target)
    for each in optimizer, twin:
        assert same_everywhere(fresh, each.target)
        each.finalize()


@of_each_kind
@on_each_rank
@pytest.mark.parametrize("call", ["flush", "synchronize", "finalize"])
def test_other_calls_are_of_one_optimizer_too(fresh, kind, where, call):
    pair = [made(fresh, kind) for _ in range(2)]
    for each in pair:
        update(each, 3)
    own = pair[::-1] if fresh.rank == where % fresh.size else pair
    numbers = [f"number {each} (SGD)" for each in (1, 2)]
    assert_refused(fresh, getattr(own[0], call), where, numbers)
    for each in pair:
        getattr(each, call)()
        update(each, 2)
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
