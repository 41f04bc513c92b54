"""A communicator serves one thread at a time, and belongs to one process."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chainermn_comm import create_communicator
from tests.support.oracles.raised import raises_on_all
from tests.support.watchdog.records import WORLD, recorded_calls
from tests.support.worlds.models import check_mean, with_grads
from tests.support.worlds.third_party import PlainCommunicator

pytestmark = [pytest.mark.world, pytest.mark.sizes(2)]

x = np.ones(1 << 20, "f4")  # so large that its sender waits
TAG = 5


def mean(comm: Any) -> None:
    comm.allreduce_grad(with_grads(w=np.ones(9, "f4")))


def agreement(comm: Any) -> None:
    reducer = comm.make_reducer()
    reducer.add(with_grads(w=np.ones(9, "f4")))
    reducer.agree()


# By what an error names: what rank 0 calls, and what rank 1 does for that to end.
CALLS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    name: (call, call)
    for name, call in {
        "bcast": lambda comm: comm.bcast(x[:9], root=1),
        "gather": lambda comm: comm.gather(x[:9]),
        "alltoall": lambda comm: comm.alltoall([x[:9], x[:9]]),
        "allreduce": lambda comm: comm.allreduce(x[:9]),
        "reduce_scatter": lambda comm: comm.reduce_scatter([x[:9], x[:9]]),
        "allgather": lambda comm: comm.allgather(x[:9]),
        "scatter": lambda comm: comm.scatter([x[:9], x[:9]]),
        "ours": lambda comm: comm.handshake("ours"),
        "bcast_obj": lambda comm: comm.bcast_obj("x", root=1),
        "gather_obj": lambda comm: comm.gather_obj("x"),
        "allreduce_obj": lambda comm: comm.allreduce_obj(1),
        "allgather_obj": lambda comm: comm.allgather_obj(1),
        "scatter_obj": lambda comm: comm.scatter_obj([1, 2]),
        "alltoall_obj": lambda comm: comm.alltoall_obj([1, 2]),
        "bcast_data": lambda comm: comm.bcast_data(with_grads(w=x[:9])),
        "a mean of gradients": mean,
        "a mean of gradients, agreed": agreement,
        "multi_node_mean": lambda comm: comm.multi_node_mean(x[:9]),
        "split": lambda comm: comm.split(0, 0),
    }.items()
} | {
    "send": (lambda comm: comm.send(x, 1, TAG), lambda comm: comm.recv(0, TAG)),
    "recv": (lambda comm: comm.recv(1, TAG), lambda comm: comm.send(x, 0, TAG)),
    "send_obj": (
        lambda comm: comm.send_obj(bytes(x), 1, TAG),
        lambda comm: comm.recv_obj(0, TAG),
    ),
    "recv_obj": (
        lambda comm: comm.recv_obj(1, TAG),
        lambda comm: comm.send_obj(1, 0, TAG),
    ),
}


@pytest.fixture(params=["naive", "hierarchical"])
def comm(request, world) -> Iterator[Any]:
    with create_communicator(request.param) as communicator:
        yield communicator


def waits_in() -> list[str]:
    """The operations in which this process waits."""
    found = [call for call in recorded_calls() if call.communicator != WORLD]
    return [call.operation for call in found if call.waits]


def check_refused(comm: Any, world: Any, first: str, second: str) -> None:
    """While one thread of rank 0 is in the first call, another one can't make the second."""
    begin, end = CALLS[first]
    with ThreadPoolExecutor(1) as thread:
        if world.rank == 0:
            under_way = thread.submit(begin, comm)
            while not (waiting := waits_in()):
                time.sleep(0.001)
            told = (
                f"rank 0: {second.partition(',')[0]}.* while {first.partition(',')[0]} "
                ".*a communicator serves one thread at a time.*split"
            )
            for _ in range(2):
                with pytest.raises(RuntimeError, match=told):
                    CALLS[second][0](comm)
                assert waits_in() == waiting
            world.Barrier()
            under_way.result()
        else:
            world.Barrier()
            end(comm)
    assert comm.allgather_obj(comm.rank) == [0, 1]
    check_mean(comm)


@pytest.mark.parametrize("first", CALLS)
def test_a_second_thread_is_told_of_the_first_ones_call(comm, world, first):
    check_refused(comm, world, first, "allreduce")


@pytest.mark.parametrize("second", CALLS)
def test_a_second_threads_call_is_named(comm, world, second):
    check_refused(comm, world, "bcast_obj", second)


def test_threads_may_take_turns(comm):
    with ThreadPoolExecutor(1) as thread:
        for _ in range(3):
            for call, _ in list(CALLS.values())[:-4]:
                call(comm)
                thread.submit(call, comm).result()
    assert comm.allgather_obj(comm.rank) == [0, 1]


def test_an_error_lets_the_next_thread_in(comm):
    with ThreadPoolExecutor(1) as thread:
        with raises_on_all(comm.rank == 0, ValueError):
            comm.bcast(x[:9], root=0 if comm.rank else 9)
        with pytest.raises(ValueError, match="itself"):
            comm.send(x, comm.rank, TAG)
        thread.submit(check_mean, comm).result()


def test_each_thread_may_have_a_communicator_of_its_own(comm):
    with comm.split(0, comm.rank) as other, ThreadPoolExecutor(1) as thread:
        for _ in range(20):
            done = thread.submit(check_mean, other, 9, 20)
            check_mean(comm, 9, 20)
            done.result()


def test_a_communicator_and_what_holds_one_cannot_be_pickled(comm, world):
    told = (
        r"Communicator can't be pickled: a communicator belongs to one process.*serial"
    )
    for thing in comm, [comm], SimpleNamespace(comm=comm), {"model": (1, comm)}:
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(TypeError, match=told):
                pickle.dumps(thing, protocol)
        with raises_on_all(world.rank == 0, TypeError, told):
            comm.bcast_obj(thing)
        assert copy.deepcopy([comm])[0] is copy.copy(comm) is comm
    check_mean(comm)


def test_a_class_of_the_users_own_says_how_it_is_pickled(comm, world):
    assert pickle.loads(pickle.dumps(Pickled(world))).rank == world.rank

    class OfOurs(type(comm)):  # type: ignore[misc]
        def __reduce__(self):
            return str, ("how it was made",)

    with OfOurs() as other:
        assert pickle.loads(pickle.dumps(other)) == "how it was made"


class Pickled(PlainCommunicator):
    """A third party's that another process can make."""

    def __getstate__(self):
        return None

    def __reduce__(self):
        return find_world, (Pickled,)


def find_world(kind: Any) -> Any:
    from mpi4py import MPI

    return kind(MPI.COMM_WORLD)
