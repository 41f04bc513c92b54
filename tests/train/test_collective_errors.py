"""What one rank finds wrong is raised on all, and is never lost on the way."""

from __future__ import annotations

from functools import partial

import pytest
from chainer.iterators import SerialIterator
from chainer.training import extensions

from chainermn_comm import PeerError, RankMismatchError
from chainermn_train import create_multi_node_evaluator
from chainermn_train.collective_errors import allgather_checked, bcast_checked
from tests.support.training.small_models import Model, X, sgd

pytestmark = pytest.mark.world


def iterator():
    return SerialIterator(X, 2, repeat=False, shuffle=False)


def by_evaluator(comm, fail):
    evaluator = extensions.Evaluator(iterator(), Model(0), eval_func=lambda _: fail())
    create_multi_node_evaluator(evaluator, comm)()


def by_action(comm, fail):
    allgather_checked(comm, "test", fail)


class Interrupts:
    """It raises when it is pickled."""

    def __init__(self, fail):
        self.fail = fail

    def __reduce_ex__(self, _):
        self.fail()


def by_broadcast(comm, fail):
    bcast_checked(comm, "test", lambda: Interrupts(fail), comm.size - 1)


WAYS = [by_action, by_evaluator, by_broadcast]


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_of_one_rank_is_told_to_all(comm, way):
    failing = comm.size - 1

    def fail():
        if comm.rank == failing:
            raise KeyboardInterrupt("planted")

    with pytest.raises((KeyboardInterrupt, PeerError)) as raised:
        way(comm, fail)
    if comm.rank == failing:
        assert raised.type is KeyboardInterrupt
    else:
        assert f"rank {failing}: KeyboardInterrupt: planted" in str(raised.value)
    assert comm.allreduce_obj(1) == comm.size


def test_values_that_are_too_large_for_a_handshake_arrive(comm):
    """Of some ranks only; a handshake is made for some kilobytes."""
    large = 1 << 20
    last = comm.size - 1
    size = 3
    if comm.rank == last:
        size = large
    mine = bytes(size)
    found = allgather_checked(comm, "test", lambda: mine)
    assert [len(each) for each in found] == [3] * last + [large]
    assert bcast_checked(comm, "test", lambda: mine, last) == bytes(large)


@pytest.mark.sizes(2, 3, 4)
def test_epochs_of_different_lengths_are_told(naive):
    """Rank 0 evaluates at the end of its epoch, and the others go on with theirs."""
    optimizer = sgd(naive, Model(0))
    evaluator = extensions.Evaluator(iterator(), optimizer.target)
    evaluator = create_multi_node_evaluator(evaluator, naive)
    call = partial(optimizer.update, optimizer.target, X)
    where = "optimizer"
    if naive.rank == 0:
        call = evaluator
        where = "evaluator"
    words = rf"This rank is in a multi-node {where}\..*equally often.*force_equal_length=False"
    with pytest.raises(RankMismatchError, match=words):
        call()
    assert naive.allreduce_obj(1) == naive.size
