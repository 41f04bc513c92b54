"""What one rank finds wrong is raised on all, and is never lost on the way."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer.iterators import SerialIterator
from chainer.training import extensions

from chainermn_comm import PeerError, RankMismatchError
from chainermn_train import (
    create_multi_node_evaluator,
    create_multi_node_iterator,
)
from chainermn_train.collective_errors import allgather_checked, bcast_checked
from chainermn_train.extensions import (
    AllreducePersistent,
    MultiNodeEarlyStoppingTrigger,
)

pytestmark = pytest.mark.world


def iterator(count):
    return SerialIterator(
        np.ones((count, 3), np.float32), 1, repeat=False, shuffle=False
    )


def by_evaluator(comm, fail):
    evaluator = extensions.Evaluator(
        iterator(2), L.Linear(3, 1), eval_func=lambda _: fail()
    )
    create_multi_node_evaluator(evaluator, comm)()


def by_iterator(comm, fail):
    class Fails(SerialIterator):
        def __next__(self):
            fail()

    master = comm.size - 1
    next(create_multi_node_iterator(Fails([1], 1), comm, rank_master=master))


def by_trigger(comm, fail):
    stop = MultiNodeEarlyStoppingTrigger(
        comm, lambda _: False, max_trigger=lambda _: fail()
    )
    stop(type("Trainer", (), {"observation": {}})())


def by_persistents(comm, fail):
    AllreducePersistent(SimpleNamespace(namedlinks=lambda: fail() or []), comm)()


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


WAYS = [by_action, by_evaluator, by_iterator, by_trigger, by_persistents, by_broadcast]


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


@pytest.mark.sizes(2, 3, 4)
def test_an_error_is_told_where_the_other_ranks_call_another_method(naive):
    """Rank 0 has an error, and so isn't in the collective call that the others are in."""
    call = partial(naive.alltoall, tuple(range(naive.size)))
    if naive.rank == 0:
        call = partial(allgather_checked, naive, "test", lambda: 1 / 0)
    with pytest.raises((ZeroDivisionError, PeerError), match="division by zero"):
        call()
    assert naive.allreduce_obj(1) == naive.size


def test_values_that_are_too_large_for_a_handshake_arrive(comm):
    """Of some ranks only; a handshake is made for some kilobytes."""
    large = 1 << 20
    last = comm.size - 1
    mine = bytes(large if comm.rank == last else 3)
    found = allgather_checked(comm, "test", lambda: mine)
    assert [len(each) for each in found] == [3] * last + [large]
    assert bcast_checked(comm, "test", lambda: mine, last) == bytes(large)


@pytest.mark.sizes(2, 3, 4)
def test_epochs_of_different_lengths_are_told(naive, trainer_for):
    """Rank 0 evaluates at the end of its epoch, and the others go on with theirs."""
    model = L.Classifier(L.Linear(3, 2))
    count = 4 + 4 * naive.rank
    x = np.ones((count, 3), np.float32)
    examples = chainer.datasets.TupleDataset(x, np.zeros(count, np.int32))
    batches = SerialIterator(examples, 2, repeat=False, shuffle=False)
    evaluator = create_multi_node_evaluator(extensions.Evaluator(batches, model), naive)
    trainer = trainer_for(
        naive, (2, "epoch"), evaluator, model=model, examples=examples
    )
    where = "optimizer" if naive.rank else "evaluator"
    words = rf"This rank is in a multi-node {where}\..*equally often.*force_equal_length=False"
    with pytest.raises(RankMismatchError, match=words):
        trainer.run(show_loop_exception_msg=False)
    assert naive.allreduce_obj(1) == naive.size
