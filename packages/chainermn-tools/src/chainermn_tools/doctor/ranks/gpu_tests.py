"""What ranks try with arrays on GPUs; every value is checked.

Only ranks may import it: that starts MPI.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from chainermn_comm import CommunicatorBase, create_communicator, devices
from chainermn_tools.bench.operations import Model

if TYPE_CHECKING:
    from mpi4py import MPI

GPU_ONLY = "pure_nccl"
# The ways that gradients on GPUs may take: NCCL in a node and what serves between nodes, NCCL
# alone, host memory between nodes, and MPI alone, which needs no device for each rank.
GPU_WAYS = ("hierarchical", GPU_ONLY, "non_cuda_aware", "flat")
SHARED_GPU_WAYS = ("flat",)
# Of the gradients on GPUs: dtypes and elements, one of them larger than a chunk.
GPU_GRADIENTS = (("f4", 12345), ("f2", 999), ("f8", 1), ("f4", 9 << 20))
GPU_CALLS = 3  # a call may return before its work is over, and raise its errors in the next one


def try_gpu_means(world: MPI.Intracomm) -> dict[str, Any]:
    """Average gradients on GPUs over all ranks by each way that there is (collective).

    Return ``ways``: by the communicator's name what went wrong, None if nothing did; ``shared``:
    whether ranks share a GPU, so that those with NCCL were left out; or ``reason``: why there are
    no GPUs to try it with.
    """
    problem = gpu_problem(world)
    if problem is not None:
        return {"reason": problem}
    shared = own_gpu_problem(world) is not None
    ways: dict[str, str | None] = {}
    with devices.use(own_device(world)):
        for name in SHARED_GPU_WAYS if shared else GPU_WAYS:
            found = None
            try:
                with create_communicator(name, world) as comm:
                    found = _mean_problem(world, comm)
            except Exception as error:  # which the last call has left to the communicator's end
                found = found or _describe(world, error)
            ways[name] = _first(world, found)
    return {"ways": ways, "shared": shared}


def _mean_problem(world: MPI.Intracomm, comm: CommunicatorBase) -> str | None:
    """Return what is wrong with means of gradients on GPUs, if anything (collective)."""
    params: list[Model] = []
    model = SimpleNamespace(namedparams=lambda: [(f"/{n}", one) for n, one in enumerate(params)])

    def prepare() -> None:
        for dtype, size in GPU_GRADIENTS:
            params.append(Model(devices.to_device(np.full(size, world.rank, dtype))))

    def look() -> None:
        for each in params:
            if not np.allclose(devices.to_host(each.grad), (world.size - 1) / 2, rtol=1e-3):
                raise ValueError("the means are wrong")

    # The mean of equal means is the same. Ranks may learn of a failure in different calls.
    mean: Callable[[], None] = partial(comm.multi_node_mean_grad, model)
    for step in (prepare, *[mean] * GPU_CALLS, look):
        problem = None
        try:
            step()
        except Exception as error:
            problem = _describe(world, error)
        if problem := _first(world, problem):
            return problem
    return None


def _describe(world: MPI.Intracomm, error: Exception) -> str:
    return f"rank {world.rank}: {type(error).__name__}: {error}"


def _first(world: MPI.Intracomm, problem: str | None) -> str | None:
    """Return the problem of the lowest rank that has one (collective)."""
    return next(filter(None, world.allgather(problem)), None)


def gpu_problem(world: MPI.Intracomm) -> str | None:
    """Return why not every rank has a GPU, be it shared; None if it has."""
    return _first(world, devices.unavailable_reason())


def own_gpu_problem(world: MPI.Intracomm) -> str | None:
    """Return why not every rank has a GPU to itself; None if it has."""
    problem = gpu_problem(world)
    if problem is not None:
        return problem
    with devices.use(own_device(world)):
        ids = world.allgather((socket.gethostname(), devices.bus_id()))
    return None if len(set(ids)) == len(ids) else "there are fewer GPUs than ranks"


def own_device(world: MPI.Intracomm) -> int:
    import cupy

    return int(world.rank % cupy.cuda.runtime.getDeviceCount())
