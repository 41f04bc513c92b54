"""Each call that waits is recorded while it waits, where the monitor reads it, and not after."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from chainermn_comm import create_communicator
from tests.support.watchdog.records import COLLECTIVE, MESSAGE, NOBODY, Neighbour
from tests.support.worlds.models import with_grads

pytestmark = [pytest.mark.world, pytest.mark.sizes(2)]

# The mean that it starts is what `multi_node_mean_grad` takes.
DOES_NOT_WAIT = {"set_config", "get_config", "make_reducer"}
OTHER_NAMES = {"broadcast_data"}  # of a method that is here
TAG = 7
# So large that a message waits for its receiver.
x = np.zeros(1 << 20, "f4")
pair = [x[:8], x[:8]]
# What rank 0 calls and what rank 1 does; and as what it is recorded: operation, root or
# peer, tag, bytes (None: what they are is the message's own business).
OF_BOTH = {
    "bcast": (lambda comm: comm.bcast(x, root=1), 1, None),
    "gather": (lambda comm: comm.gather(x, root=1), 1, None),
    "alltoall": (lambda comm: comm.alltoall(pair), NOBODY, None),
    "allreduce": (lambda comm: comm.allreduce(x), NOBODY, x.nbytes),
    "reduce_scatter": (lambda comm: comm.reduce_scatter(pair), NOBODY, 64),
    "allgather": (lambda comm: comm.allgather(x), NOBODY, None),
    "handshake": (
        lambda comm: comm.handshake("handshake", payload=b"12345"),
        NOBODY,
        5,
    ),
    "scatter": (lambda comm: comm.scatter(pair, root=1), 1, None),
    "bcast_obj": (lambda comm: comm.bcast_obj("x", root=1), 1, None),
    "gather_obj": (lambda comm: comm.gather_obj("x", root=1), 1, None),
    "allreduce_obj": (lambda comm: comm.allreduce_obj(1), NOBODY, None),
    "allgather_obj": (lambda comm: comm.allgather_obj(1), NOBODY, None),
    "scatter_obj": (lambda comm: comm.scatter_obj([1, 2], root=1), 1, None),
    "alltoall_obj": (lambda comm: comm.alltoall_obj([1, 2]), NOBODY, None),
    "bcast_data": (lambda comm: comm.bcast_data(with_grads(w=x)), NOBODY, None),
    "allreduce_grad": (
        lambda comm: comm.allreduce_grad(with_grads(w=x)),
        NOBODY,
        x.nbytes,
    ),
    "multi_node_mean_grad": (
        lambda comm: comm.multi_node_mean_grad(with_grads(w=x)),
        NOBODY,
        x.nbytes,
    ),
    "multi_node_mean": (lambda comm: comm.multi_node_mean(x), NOBODY, x.nbytes),
    "split": (lambda comm: comm.split(0, 0).finalize(), NOBODY, None),
    "finalize": (lambda comm: comm.finalize(), NOBODY, None),
}
NOTED_AS = {
    "multi_node_mean_grad": "allreduce_grad",
    "send_with_metadata": "send",
    "recv_with_metadata": "recv",
}
MESSAGES = {
    "send": (lambda comm: comm.send(x, 1, TAG), lambda comm: comm.recv(0, TAG)),
    "recv": (lambda comm: comm.recv(1, TAG), lambda comm: comm.send(x, 0, TAG)),
    "send_with_metadata": (
        lambda comm: comm.send_with_metadata(b"x", (x,), 1, TAG),
        lambda comm: comm.recv_with_metadata(0, TAG),
    ),
    "recv_with_metadata": (
        lambda comm: comm.recv_with_metadata(1, TAG),
        lambda comm: comm.send_with_metadata(b"x", (x,), 0, TAG),
    ),
    "send_obj": (
        lambda comm: comm.send_obj(bytes(x), 1, TAG),
        lambda comm: comm.recv_obj(0, TAG),
    ),
    "recv_obj": (
        lambda comm: comm.recv_obj(1, TAG),
        lambda comm: comm.send_obj("x", 0, TAG),
    ),
}


@pytest.fixture
def watched(world, monkeypatch):
    monkeypatch.delenv("CHAINERMN_TIMEOUT", raising=False)
    with create_communicator("hierarchical") as comm:
        yield comm, Neighbour(world)


def test_each_method_that_may_wait_is_in_these_tests(watched):
    public = {
        name
        for name, method in inspect.getmembers(type(watched[0]), inspect.isfunction)
        if not name.startswith("_")
    }
    assert public == {*OF_BOTH, *MESSAGES, *DOES_NOT_WAIT, *OTHER_NAMES}


@pytest.mark.parametrize("name", OF_BOTH)
def test_a_collective_call_is_recorded_until_it_ends(name, watched, world):
    comm, neighbour = watched
    call, root, nbytes = OF_BOTH[name]
    comm.handshake("handshake")  # the first
    world.Barrier()
    seen = neighbour.seen_waiting() if world.rank == 1 else None
    call(comm)
    world.Barrier()
    assert neighbour.waits_in() == []
    if seen is not None:
        assert (seen.operation, seen.state) == (NOTED_AS.get(name, name), COLLECTIVE)
        assert (seen.rank, seen.size, seen.sequence) == (0, 2, 2)
        assert seen.peer == root
        assert nbytes in (None, seen.nbytes)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_recorded_until_it_has_come(name, watched, world):
    comm, neighbour = watched
    seen = neighbour.seen_waiting() if world.rank == 1 else None
    MESSAGES[name][world.rank](comm)
    world.Barrier()
    assert neighbour.waits_in() == []
    if seen is not None:
        assert (seen.operation, seen.state) == (NOTED_AS.get(name, name), MESSAGE)
        assert (seen.peer, seen.tag) == (1, TAG)
        assert (seen.nbytes >= x.nbytes) == name.startswith("send")


def test_between_the_steps_of_a_mean_a_rank_waits_in_nothing(watched, world):
    """Whatever it computes there takes its time."""
    comm, neighbour = watched
    model = with_grads(v=x[:9] + comm.rank)
    reducer = comm.make_reducer(True)
    reducer.add(model)
    waits_in_nothing(neighbour, world)
    reducer.agree()
    waits_in_nothing(neighbour, world)
    work = reducer.start()
    seen = neighbour.seen_waiting() if world.rank == 1 else None
    work.wait()
    waits_in_nothing(neighbour, world)
    work.assign()
    np.testing.assert_array_equal(model["v"].grad, 0.5)
    assert seen is None or seen.state == COLLECTIVE


def waits_in_nothing(neighbour, world):
    world.Barrier()
    assert neighbour.waits_in() == []
    world.Barrier()


def test_an_error_ends_the_record_too(watched, world):
    comm, neighbour = watched
    with pytest.raises(ValueError, match="root"):
        comm.bcast(x, root=5)
    with pytest.raises(ValueError, match="itself"):
        comm.send(x, world.rank, TAG)
    world.Barrier()
    assert neighbour.waits_in() == []
