"""What a step costs in the steady state, as the double's device writes it down."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.support.doubles import gpus
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]

# By a name, the nodes of the ranks.
NODES = {
    "pure_nccl": (0, 0, 0, 0),
    "hierarchical": (0, 0, 1, 1),
    "two_dimensional": (0, 0, 1, 1),
}
ONE_TIME = ("compile", "streamCreate", "commInitRank", "memcpyAsync to host")


# Gradients of many chunks.
SIZES = (5000, 3, 700, 2100, 64, 3000)


def model_of(sizes, number):
    return gpus.model_of([np.full(size, number, "f4") for size in sizes])


@pytest.mark.parametrize("wire", [None, "float16"])
@pytest.mark.parametrize("name", NODES)
def test_a_step_neither_waits_nor_compiles_and_agrees_once(
    world, double, monkeypatch, name, wire
):
    model = model_of(SIZES, world.rank)
    steps = 3
    with on_nodes(NODES[name][: world.size], name, allreduce_grad_dtype=wire) as comm:
        comm.set_config("chunk_bytes", 1 << 12)
        for _ in range(3):
            comm.allreduce_grad(model)
            gpus.to_host(model["p000"].grad)
        gpus.settle(world, comm)
        double.made.clear()
        double.host_waits = 0
        gathers = gpus.count_allgathers(monkeypatch)
        for _ in range(steps):
            comm.allreduce_grad(model)
        made = list(double.made)
        assert double.host_waits == 0
        assert gathers == [steps]  # the one by which ranks agree
        assert "launchKernel" in made
        assert not {*ONE_TIME} & {*made}
        # Of CuPy's pools: what the kernels walk.
        assert made.count("malloc") == steps
        assert made.count("memcpyAsync to device") == steps


def test_gradients_may_be_dropped_before_their_means_are_there(world, double):
    """Their memory lives until the device is done with it."""
    double.delay = 40
    with on_nodes([0] * world.size, "pure_nccl") as comm:
        for step in range(6):
            comm.allreduce_grad(model_of(SIZES, world.rank))
            if step % 2:
                gpus.assert_mean(comm)


def test_calls_on_different_streams_follow_one_another(world, gpu):
    """They share a buffer, into which each packs."""
    import cupy

    gpus.one_each(world)
    with on_nodes([0] * world.size, "pure_nccl") as comm:
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
        found = []
        for number in range(9):
            model = model_of((3, 5), comm.rank + number)
            with streams[number % 3] as stream:
                comm.allreduce_grad(model)
                found.append((stream, model))
        for number, (stream, model) in enumerate(found):
            with stream:
                mean = gpus.to_host(model["p001"].grad)
            assert_allclose(mean, number + (comm.size - 1) / 2, rtol=1e-6)
