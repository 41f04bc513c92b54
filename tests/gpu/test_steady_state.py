"""What a step costs in the steady state, as the double's device writes it down."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm import CommunicationError
from tests.support.doubles import gpus
from tests.support.doubles.device_double import ILLEGAL_ADDRESS, ticks_waited
from tests.support.worlds.models import Model, Param
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]

NCCL = ("allReduce", "reduce", "broadcast", "reduceScatter", "allGather")
# By a name, the nodes of the ranks.
NODES = {
    "pure_nccl": (0, 0, 0, 0),
    "hierarchical": (0, 0, 1, 1),
    "two_dimensional": (0, 0, 1, 1),
}
CHUNK_BYTES = 1 << 12
ONE_TIME = (
    "malloc",
    "hostAlloc",
    "compile",
    "eventCreate",
    "streamCreate",
    "commInitRank",
)


def models(world) -> Model:
    """Gradients of many chunks; in their own dtype all but one are summed where they lie."""
    sizes = (5000, 3, 700, 2100, 64, 3000)
    grads = [gpus.put(np.full(size, world.rank, "f4")) for size in sizes]
    return Model(**{f"p{i}": Param(grad, grad) for i, grad in enumerate(grads)})


def make(world, name: str, wire: str | None = None):
    comm = on_nodes(NODES[name][: world.size], name, allreduce_grad_dtype=wire)
    comm.set_config("chunk_bytes", CHUNK_BYTES)
    return comm


@pytest.mark.parametrize("wire", [None, "float16"])
@pytest.mark.parametrize("name", NODES)
def test_a_step_neither_waits_nor_allocates_nor_compiles(
    world, double, monkeypatch, name, wire
):
    model, steps = models(world), 3
    with make(world, name, wire) as comm:
        for _ in range(3):
            comm.allreduce_grad(model)
            gpus.to_host(model["p0"].grad)
        world.Barrier()
        events = double.made.count("eventCreate")
        double.made.clear()
        double.host_waits = 0
        gathers = gpus.count_allgathers(monkeypatch)
        for _ in range(steps):
            comm.allreduce_grad(model)
        made = list(double.made)
        assert double.host_waits == 0
        assert gathers == [steps]  # the one by which ranks agree
        assert "launchKernel" in made
        one_time = {call: made.count(call) for call in ONE_TIME if call in made}
        # Calls whose end nobody has seen yet have an event each.
        assert one_time.pop("eventCreate", 0) <= steps
        assert not one_time
        assert not any(call.startswith("memcpy") for call in made)
        assert events > 0


@pytest.mark.parametrize("wire", [None, "float16"])
@pytest.mark.parametrize("name", NODES)
def test_nccl_never_waits_for_an_unpack(world, double, name, wire):
    double.ticks = dict.fromkeys(NCCL, 2)
    model = models(world)
    with make(world, name, wire) as comm:
        for _ in range(2):
            comm.allreduce_grad(model)
            gpus.to_host(model["p0"].grad)
        double.timeline.clear()
        comm.allreduce_grad(model)
        line = list(double.timeline)
    unpacks = [piece for piece in line if piece.name.startswith("unpack")]
    assert len(unpacks) > 8 if wire else len(unpacks) == 1
    assert ticks_waited(line, NCCL, "unpack") == 0
    # An unpack begins when its chunk's sum has ended, not when the next one's has.
    if wire:
        sums = [piece for piece in line if piece.name.startswith(NCCL)]
        each = len(sums) // len(unpacks)
        ends = [piece.end for piece in sums[each - 1 :: each]]
        assert [piece.start for piece in unpacks] == ends


def test_the_time_line_shows_when_nccl_does_wait(world, double):
    """A check of the one above: with a single buffer everything waits for everything."""
    double.ticks = dict.fromkeys(NCCL, 2)
    model = models(world)
    with gpus.slots(1), make(world, "pure_nccl", "float16") as comm:
        comm.allreduce_grad(model)
        assert ticks_waited(double.timeline, NCCL, "unpack") > 0


def test_without_threads_in_mpi_each_call_waits_and_raises_itself(
    world, double, monkeypatch
):
    has_thread, model = gpus.without_thread(monkeypatch), models(world)
    with make(world, "pure_nccl") as comm:
        for _ in range(2):
            comm.allreduce_grad(model)
            assert not any(stream.queue for stream in double.streams[1:])  # all is over
        assert not has_thread()
        if world.rank == 1:
            double.plant("allReduce", after=2)
        told = (
            "cudaErrorMemoryAllocation"
            if world.rank == 1
            else "NCCL_ERROR_REMOTE_ERROR"
        )
        with pytest.raises(CommunicationError, match=told):
            comm.allreduce_grad(model)


def test_what_fails_after_the_last_call_is_told_by_finalize(world, double):
    model = models(world)
    comm = make(world, "pure_nccl")
    comm.allreduce_grad(model)
    gpus.to_host(model["p0"].grad)
    world.Barrier()
    comm.allreduce_grad(model)
    double.plant("getAsyncError", ILLEGAL_ADDRESS)
    with pytest.raises(CommunicationError, match="cudaErrorIllegalAddress"):
        gpus.finalize_or_hear(comm)
    comm.finalize()


def test_gradients_may_be_dropped_before_their_means_are_there(world, double):
    """Their memory lives until the device is done with it."""
    double.delay = 40
    with make(world, "pure_nccl") as comm:
        for step in range(6):
            comm.allreduce_grad(models(world))
            if step % 2:
                gpus.assert_mean(comm)
