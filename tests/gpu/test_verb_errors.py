"""A CUDA error at any call that a verb makes is raised on all its ranks, and none waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from chainermn_comm import CommunicationError, PeerError, create_communicator
from tests.support.doubles import gpus
from tests.support.doubles.device_double import ILLEGAL_ADDRESS
from tests.support.worlds.models import Model, Param

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]

WORDS = "cudaErrorIllegalAddress: an illegal memory access"
OUT, BACK = "memcpyAsync to host", "memcpyAsync to device"
BOTH_WAYS = ("malloc", "hostAlloc", "eventCreate", "eventRecord", "eventQuery", "work")


@pytest.fixture
def comm(double) -> Iterator:
    """With buffers so small that most arrays take several copies."""
    with gpus.small_buffers(4096), create_communicator("naive") as communicator:
        yield communicator


def strided(rows: int = 3):
    """An array of which a contiguous copy is made before it is sent."""
    return gpus.put(np.ones((rows, 4), "f4"))[:, ::2]


# Each makes its arrays and gives the call; then how rank 0 and the others copy.
def bcast(comm) -> Callable:
    mine = None if comm.rank else strided()
    return lambda: comm.bcast(mine)


def gather(comm) -> Callable:
    mine = strided()
    return lambda: comm.gather(mine)


def scatter(comm) -> Callable:
    mine = None if comm.rank else [strided() for _ in range(comm.size)]
    return lambda: comm.scatter(mine)


def allgather(comm) -> Callable:
    mine = strided(), strided(2000)
    return lambda: comm.allgather(mine)


def alltoall(comm) -> Callable:
    mine = [strided() for _ in range(comm.size)]
    return lambda: comm.alltoall(mine)


def allreduce(comm) -> Callable:
    mine = strided()
    return lambda: comm.allreduce(mine)


def mean_into(comm) -> Callable:
    mine, out = strided(), strided()
    return lambda: comm.multi_node_mean(mine, out)


def bcast_data(comm) -> Callable:
    params = strided(), strided(2000), np.zeros(3), gpus.put(np.zeros(3))
    model = Model(**{f"p{i}": Param(array) for i, array in enumerate(params)})
    return lambda: comm.bcast_data(model)


VERBS = {
    bcast: ((OUT, BACK), (BACK,)),
    gather: ((OUT, BACK), (OUT,)),
    scatter: ((OUT, BACK), (BACK,)),
    allgather: ((OUT, BACK), (OUT, BACK)),
    alltoall: ((OUT, BACK), (OUT, BACK)),
    allreduce: ((OUT, BACK), (OUT, BACK)),
    mean_into: ((OUT, BACK), (OUT, BACK)),
    bcast_data: ((OUT,), (BACK,)),
}
# Of each verb the first tiers take half of the calls on one rank, and the others on
# another.
CASES = [
    pytest.param(
        verb,
        call,
        on_last,
        id=f"{verb.__name__}-{call}-{'last rank' if on_last else 'rank 0'}",
        marks=() if (number + on_last + place) % 2 else pytest.mark.full,
    )
    for number, (verb, ways) in enumerate(VERBS.items())
    for on_last, copies in enumerate(ways)
    for place, call in enumerate((*BOTH_WAYS, *copies))
]


@pytest.mark.parametrize(("verb", "call", "on_last"), CASES)
def test_an_error_is_raised_on_all_ranks(comm, double, verb, call, on_last):
    fails = comm.rank == (comm.size - 1 if on_last else 0)
    # The first such call and later ones, some of them after data have moved.
    for after in range(4):
        run, error = verb(comm), None
        if fails:
            double.plant(call, ILLEGAL_ADDRESS, after)
        try:
            run()
        except CommunicationError as raised:
            error = raised
        happened = comm.allgather_obj(double.recover() if fails else None)
        assert (True in happened) or after, "the call isn't made"
        assert (error is not None) == (True in happened)
        if error is not None:
            assert WORDS in str(error)
            assert isinstance(error, PeerError) != fails
    verb(comm)()


@pytest.mark.parametrize("call", [*BOTH_WAYS, OUT])
@pytest.mark.parametrize("with_metadata", [False, True])
def test_a_sender_that_fails_raises_and_sends_nothing(
    comm, double, call, with_metadata
):
    if comm.rank == 0:
        array = strided()
        double.plant(call, ILLEGAL_ADDRESS)
        send = partial(comm.send_with_metadata, b"") if with_metadata else comm.send
        with pytest.raises(CommunicationError, match=f"rank 0: .*{WORDS}"):
            send((array,), dest=1)
        assert double.recover()
        comm.send(array, dest=1)
    elif comm.rank == 1:
        assert gpus.on_gpu(comm.recv(source=0))
    assert comm.allreduce_obj(1) == comm.size


@pytest.mark.parametrize("call", [*BOTH_WAYS, BACK])
def test_a_receiver_that_fails_raises_alone_and_gets_the_next_message(
    comm, double, call
):
    if comm.rank == 0:
        for size in (3, 5000, 3):
            comm.send(gpus.put(np.ones(size)), dest=1)
    elif comm.rank == 1:
        for size in (3, 5000):
            double.plant(call, ILLEGAL_ADDRESS)
            with pytest.raises(CommunicationError, match=f"rank 1: .*{WORDS}"):
                comm.recv(source=0)
            assert double.recover(), size
        np.testing.assert_array_equal(gpus.to_host(comm.recv(source=0)), np.ones(3))
    assert comm.allreduce_obj(1) == comm.size


def test_a_rank_without_a_gpu_is_told_on_all_ranks(comm, double):
    array = strided() if comm.rank == 0 else None
    double.count = 0 if comm.rank == comm.size - 1 else 1
    with pytest.raises(
        CommunicationError, match=f"rank {comm.size - 1}: .*CUDA finds no device"
    ):
        comm.bcast(array)
    double.count = 1
    comm.bcast(array)
