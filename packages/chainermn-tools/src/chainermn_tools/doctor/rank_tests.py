"""Tests of messages and communicators by ranks, which check every value that arrives.

Only ranks may import this module, because the import starts MPI. Each function returns
``problem``, a sentence about what went wrong on any rank, or None; or ``reason``, why
nothing was tried. Both are the same on all ranks.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from chainermn_comm import CommunicatorBase, create_communicator
from chainermn_comm.gpu import devices

if TYPE_CHECKING:
    from mpi4py import MPI

# Bytes that a rank sends to all other ranks together: large messages among few ranks,
# but quickly sent.
SENT_BYTES = 16 << 20
COUNT = 12345  # elements of an array
# The communicator that exchanges nothing, and leaves gradients as they are.
NO_OP = "dummy"
GPU_ONLY = "pure_nccl"
# The communicators that don't need a GPU for each rank.
SHARING_GPUS = ("naive", "flat", NO_OP)
# The dtypes and sizes of gradients on GPUs; some are larger than a chunk.
GPU_GRADIENTS = (("f4", 12345), ("f2", 999), ("f8", 1), ("f4", 9 << 20))
# A call may return before its work is over, and raise its errors in the next one.
GPU_CALLS = 3


def try_messages(world: MPI.Intracomm) -> dict[str, Any]:
    """Let each rank send a large message to each, through MPI itself (collective)."""
    count = SENT_BYTES // 8 // world.size
    sent = np.empty((world.size, count))
    sent[:] = world.rank + np.arange(count)
    received = np.empty_like(sent)
    world.Alltoall(sent, received)
    wanted = np.arange(world.size)[:, np.newaxis] + np.arange(count)
    problem = None
    if not np.array_equal(received, wanted):
        problem = "wrong values arrived"
    return {"problem": _first(world, problem)}


def try_communicator(world: MPI.Intracomm, name: str) -> dict[str, Any]:
    """Try a communicator on arrays in host memory (collective)."""
    if name == GPU_ONLY:
        return {"reason": "it is for GPUs only"}
    return _attempt(world, name, _try_operations)


def try_on_gpus(world: MPI.Intracomm, name: str) -> dict[str, Any]:
    """Try a communicator's mean of gradients on GPUs, if each rank has one (collective)."""
    reason = _gpu_problem(world, name)
    if reason is not None:
        return {"reason": reason}
    with devices.use(_own_device(world)):
        return _attempt(world, name, _try_gradients)


def _attempt(
    world: MPI.Intracomm,
    name: str,
    try_all: Callable[[CommunicatorBase, str], Iterator[tuple[str, bool]]],
) -> dict[str, Any]:
    """Make a communicator, try its operations, and return the first problem (collective)."""
    problem = None
    try:
        with create_communicator(name, world) as comm:
            for operation, is_right in try_all(comm, name):
                if not is_right:
                    problem = f"wrong values of {operation} arrived"
    except Exception as error:  # all ranks raise
        problem = f"{type(error).__name__}: {error}"
    return {"problem": _first(world, problem)}


def _try_operations(comm: CommunicatorBase, name: str) -> Iterator[tuple[str, bool]]:
    """Yield each operation, and whether its result is right on this rank (collective)."""
    pattern = np.arange(COUNT, dtype=np.float32)
    mine = pattern + comm.rank
    yield "bcast", np.array_equal(comm.bcast(mine), pattern)
    total = comm.size * pattern + sum(range(comm.size))
    yield "allreduce", np.allclose(comm.allreduce(mine), total)
    if comm.size > 1:
        last = comm.size - 1
        if comm.rank == 0:
            comm.send(pattern, last, 0)
        if comm.rank == last:
            yield "send", np.array_equal(comm.recv(0, 0), pattern)
    mean = pattern + (comm.size - 1) / 2
    if name == NO_OP:
        mean = mine.copy()
    (grad,) = mean_grads(comm, [mine.copy()])
    yield "mean_grad", np.allclose(grad, mean)


def _try_gradients(comm: CommunicatorBase, name: str) -> Iterator[tuple[str, bool]]:
    """Yield whether means of gradients on GPUs are right on this rank (collective)."""
    import cupy

    mean = (comm.size - 1) / 2
    if name == NO_OP:
        mean = comm.rank
    for _ in range(GPU_CALLS):
        grads = [
            cupy.asarray(np.full(size, comm.rank, dtype))
            for dtype, size in GPU_GRADIENTS
        ]
        for grad in mean_grads(comm, grads):
            yield "mean_grad", np.allclose(grad.get(), mean, rtol=1e-3)


def mean_grads(comm: CommunicatorBase, grads: list[Any]) -> list[Any]:
    """Return the means of these gradients over ranks, as a model gets them (collective)."""
    params = [SimpleNamespace(data=grad, grad=grad) for grad in grads]
    named = [(f"/{number}", param) for number, param in enumerate(params)]
    comm.multi_node_mean_grad(SimpleNamespace(namedparams=lambda: named))
    return [param.grad for param in params]


def _first(world: MPI.Intracomm, problem: str | None) -> str | None:
    """Return the first rank's problem, with its rank; None if no rank has any (collective)."""
    for rank, found in enumerate(world.allgather(problem)):
        if found is not None:
            return f"rank {rank}: {found}"
    return None


def _gpu_problem(world: MPI.Intracomm, name: str) -> str | None:
    """Return why a rank has no GPU, or shares one, which not all communicators allow."""
    for reason in world.allgather(devices.unavailable_reason()):
        if reason is not None:
            return str(reason)
    if name not in SHARING_GPUS:
        with devices.use(_own_device(world)):
            ids = world.allgather((socket.gethostname(), devices.bus_id()))
        if len(set(ids)) < len(ids):
            return "there are fewer GPUs than ranks"
    return None


def _own_device(world: MPI.Intracomm) -> int:
    import cupy

    return int(world.rank % cupy.cuda.runtime.getDeviceCount())
