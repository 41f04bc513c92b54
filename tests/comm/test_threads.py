"""A communicator serves one thread at a time, and belongs to one process."""

from __future__ import annotations

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from types import SimpleNamespace

import numpy as np
import pytest

from chainermn_comm import create_communicator
from tests.comm.methods import GIVEN
from tests.support.oracles.raised import raises_on_all
from tests.support.watchdog.records import WORLD, recorded_calls
from tests.support.worlds.models import check_mean, with_grads

pytestmark = [pytest.mark.world, pytest.mark.sizes(2)]

x = np.ones(1 << 20, "f4")  # so large that its sender waits
TAG = 5


def agreement(comm):
    reducer = comm.make_reducer()
    reducer.add(with_grads(w=np.ones(9, "f4")))
    reducer.agree()


def calling(method, *arguments):

    def call(comm):
        return getattr(comm, method)(*arguments)

    return call


def message(method, *data):

    def call(comm):
        return getattr(comm, method)(*data, 1 - comm.rank, TAG)

    return call


send = message("send", x)
recv = message("recv")
send_obj = message("send_obj", bytes(x))
recv_obj = message("recv_obj")


COLLECTIVE = {
    **{method: calling(method, *arguments) for method, arguments in GIVEN.items()},
    "handshake": calling("handshake", "handshake"),
    "agreement": agreement,
}
# What rank 0 calls, and what rank 1 does for that to end.
CALLS = {
    **{name: (call, call) for name, call in COLLECTIVE.items()},
    "send": (send, recv),
    "recv": (recv, send),
    "send_obj": (send_obj, recv_obj),
    "recv_obj": (recv_obj, send_obj),
}
# How an error names them.
NAMES = {
    "allreduce_grad": "a mean of gradients",
    "agreement": "a mean of gradients",
}


def waits_in():
    """The operations in which this process waits."""
    found = [call for call in recorded_calls() if call.communicator != WORLD]
    return [call.operation for call in found if call.waits]


@pytest.mark.parametrize("first", CALLS)
def test_a_second_threads_call_is_refused_and_both_are_named(naive, world, first):
    """While one thread of rank 0 is in a call, another one can't make the next of the table."""
    order = list(CALLS)
    second = order[order.index(first) - 1]
    told = (
        f"rank 0: {NAMES.get(second, second)} .* while {NAMES.get(first, first)} "
        ".*a communicator serves one thread at a time.*split"
    )
    begin, end = CALLS[first]
    with ThreadPoolExecutor(1) as thread:
        if world.rank == 0:
            under_way = thread.submit(begin, naive)
            while not (waiting := waits_in()):
                time.sleep(0.001)
            with pytest.raises(RuntimeError, match=told):
                CALLS[second][0](naive)
            assert waits_in() == waiting
            world.Barrier()
            under_way.result()
        else:
            world.Barrier()
            end(naive)
    assert naive.allgather_obj(naive.rank) == [0, 1]
    check_mean(naive)


def test_no_mean_begins_in_the_memory_of_another_threads_sum(world):
    with create_communicator("hierarchical") as comm, ThreadPoolExecutor(1) as thread:
        check_mean(comm)
        if world.rank == 0:
            under_way = thread.submit(comm.allreduce, x)
            while not waits_in():
                time.sleep(0.001)
            reducer = comm.make_reducer()
            reducer.add(with_grads(w=np.ones(9, "f4")))
            with pytest.raises(RuntimeError, match="one thread at a time"):
                reducer.agree()
            world.Barrier()
            under_way.result()
        else:
            world.Barrier()
            comm.allreduce(x)
        check_mean(comm)


def test_threads_may_take_turns(naive):
    with ThreadPoolExecutor(1) as thread:
        for call in COLLECTIVE.values():
            call(naive)
            thread.submit(call, naive).result()
    assert naive.allgather_obj(naive.rank) == [0, 1]


def test_an_error_lets_the_next_thread_in(naive):
    with ThreadPoolExecutor(1) as thread:
        root = 9
        if naive.rank:
            root = 0
        with raises_on_all(naive.rank == 0, ValueError):
            naive.bcast(1, root=root)
        with pytest.raises(ValueError, match="itself"):
            naive.send(x, naive.rank, TAG)
        thread.submit(check_mean, naive).result()


def test_each_thread_may_have_a_communicator_of_its_own(world):
    """Nothing that mpi4py does with the interpreter held waits for other ranks."""
    for _ in range(40):
        with (
            create_communicator("hierarchical") as comm,
            comm.split(0, comm.rank) as other,
            ThreadPoolExecutor(1) as thread,
        ):
            done = thread.submit(check_mean, other, 9, 20)
            check_mean(comm, 9, 20)
            done.result()


def test_a_communicator_and_what_holds_one_cannot_be_pickled(naive):
    told = (
        r"Communicator can't be pickled: a communicator belongs to one process.*serial"
    )
    for thing in naive, {"model": (1, SimpleNamespace(comm=naive))}:
        with pytest.raises(TypeError, match=told):
            pickle.dumps(thing)
        with raises_on_all(naive.rank == 0, TypeError, told):
            naive.bcast_obj(thing)
    assert deepcopy([naive])[0] is copy(naive) is naive


def test_a_class_of_the_users_own_says_how_it_is_pickled(comm):
    class OfOurs(type(comm)):  # type: ignore[misc]
        def __reduce__(self):
            return str, ("how it was made",)

    with OfOurs() as other:
        assert pickle.loads(pickle.dumps(other)) == "how it was made"
