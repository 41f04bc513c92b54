"""Each call that waits is recorded while it waits, where the monitor reads it, and not after."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from chainermn_comm import create_communicator
from tests.comm.methods import GIVEN
from tests.support.oracles.verbs import all_of
from tests.support.watchdog.records import COLLECTIVE, MESSAGE, NOBODY, Neighbour
from tests.support.worlds.models import with_grads

pytestmark = [pytest.mark.world, pytest.mark.sizes(2)]

# The mean that it starts is what `multi_node_mean_grad` takes.
DOES_NOT_WAIT = {"set_config", "get_config", "make_reducer"}
OTHER_NAMES = {"broadcast_data"}  # of a method that is here
IN_NO_OTHER_TABLE = {"handshake", "multi_node_mean_grad", "finalize"}
TAG = 7
# So large that a message waits for its receiver.
x = np.zeros(1 << 20, "f4")
pair = [x[:8], x[:8]]
model = with_grads(w=x)
# What each collective method is called with, here with rank 1 for its root.
ROOTED = {
    "bcast": x,
    "gather": x,
    "scatter": pair,
    "bcast_obj": "x",
    "gather_obj": "x",
    "scatter_obj": [1, 2],
}
ARGUMENTS = {
    **{name: (value,) for name, value in ROOTED.items()},
    "alltoall": (pair,),
    "allreduce": (x,),
    "reduce_scatter": (pair,),
    "allgather": (x,),
    "handshake": ("handshake",),
    "allreduce_obj": (1,),
    "allgather_obj": (1,),
    "alltoall_obj": ([1, 2],),
    "bcast_data": (model,),
    "allreduce_grad": (model,),
    "multi_node_mean_grad": (model,),
    "multi_node_mean": (x,),
    "split": (0, 0),
    "finalize": (),
}
# Of the others they are the message's own business.
NBYTES = {
    "allreduce": x.nbytes,
    "reduce_scatter": 64,
    "handshake": 5,
    "allreduce_grad": x.nbytes,
    "multi_node_mean_grad": x.nbytes,
    "multi_node_mean": x.nbytes,
}
NOTED_AS = {
    "multi_node_mean_grad": "allreduce_grad",
    "send_with_metadata": "send",
    "recv_with_metadata": "recv",
}
SENT = {"send": (x,), "send_with_metadata": (b"x", (x,)), "send_obj": (bytes(x),)}
RECEIVING = {name: name.replace("send", "recv") for name in SENT}
OPPOSITE = RECEIVING | {recv: send for send, recv in RECEIVING.items()}


def call(comm, name):
    options = {}
    if name in ROOTED:
        options["root"] = 1
    if name == "handshake":
        options["payload"] = b"12345"
    found = getattr(comm, name)(*ARGUMENTS[name], **options)
    if name == "split":
        found.finalize()


def send_or_receive(comm, name):
    getattr(comm, name)(*SENT.get(name, ()), 1 - comm.rank, TAG)


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
    assert public == {*ARGUMENTS, *OPPOSITE, *DOES_NOT_WAIT, *OTHER_NAMES}
    assert ARGUMENTS.keys() - GIVEN.keys() == IN_NO_OTHER_TABLE
    of_arrays = {name for name in GIVEN if not name.endswith("_obj")}
    assert of_arrays - {"split"} <= {name.split()[0] for name in all_of("float32")}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_collective_call_is_recorded_until_it_ends(name, watched, world):
    comm, neighbour = watched
    comm.handshake("handshake")  # the first
    world.Barrier()
    seen = None
    if world.rank == 1:
        seen = neighbour.seen_waiting()
    call(comm, name)
    world.Barrier()
    assert neighbour.waits_in() == []
    if seen is not None:
        assert seen.operation == NOTED_AS.get(name, name)
        assert seen.state == COLLECTIVE
        assert seen.rank == 0
        assert seen.size == 2
        assert seen.sequence == 2
        peer = NOBODY
        if name in ROOTED:
            peer = 1
        assert seen.peer == peer
        assert seen.nbytes == NBYTES.get(name, seen.nbytes)


@pytest.mark.parametrize("name", OPPOSITE)
def test_a_message_is_recorded_until_it_has_come(name, watched, world):
    comm, neighbour = watched
    seen = None
    if world.rank == 1:
        seen = neighbour.seen_waiting()
    send_or_receive(comm, (name, OPPOSITE[name])[world.rank])
    world.Barrier()
    assert neighbour.waits_in() == []
    if seen is not None:
        assert seen.operation == NOTED_AS.get(name, name)
        assert seen.state == MESSAGE
        assert seen.peer == 1
        assert seen.tag == TAG
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
    waits_in_nothing(neighbour, world)
    seen = None
    if world.rank == 1:
        seen = neighbour.seen_waiting()
    work.wait()
    waits_in_nothing(neighbour, world)
    work.assign()
    assert_array_equal(model["v"].grad, 0.5)
    if seen is not None:
        assert seen.operation == "preparing sums"  # in `wait`, of the first mean


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
