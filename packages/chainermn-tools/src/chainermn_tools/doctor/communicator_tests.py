"""What ranks try with messages, communicators and GPUs; every value that arrives is checked."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from chainermn_comm import CommunicatorBase, create_communicator, devices
from chainermn_comm.gpu import mpi_takes_gpu_memory
from chainermn_tools.bench.operations import BASELINES, MEAN_GRAD, OPERATIONS, Invocation
from chainermn_tools.bench.timing import is_correct, time_all

if TYPE_CHECKING:
    from mpi4py import MPI

# Elements of the gradients that are timed: more than caches hold, and still a moment's work.
COUNT = 4 << 20
CHECKED_COUNT = 12345
TIMED_SECONDS = 0.2
VERBS = ("send", "bcast", "allreduce", MEAN_GRAD)
# The communicator that exchanges nothing, and leaves gradients as they are.
NO_OP = "dummy"
GPU_ONLY = "pure_nccl"


def try_messages(world: MPI.Intracomm) -> dict[str, Any]:
    """Send messages through MPI itself, from rank 0 to the last and back (collective).

    Args:
        world: all ranks.

    Returns:
        ``right``: whether they arrived as they were; ``problem``: what was raised, if anything;
        ``bytes_per_second`` of them and ``copied_bytes_per_second`` of a copy in memory.
    """
    if world.size == 1:
        return {"right": True, "problem": None}
    with create_communicator("naive", world) as comm:
        return _time(world, comm, "send")


def try_communicator(world: MPI.Intracomm, name: str, timed: bool = True) -> dict[str, Any]:
    """Try a communicator's verbs on NumPy arrays, and on GPUs where each rank has one (collective).

    Args:
        world: all ranks.
        name: of the communicator.
        timed: whether the mean of large gradients is timed, too.

    Returns:
        ``wrong``: the verbs that gave wrong values, on any rank; ``problem``: what was raised;
        ``why_not``: why it can't be made here; rates as of :func:`try_messages`.
    """
    gpu_problem = _own_gpu_problem(world)
    if name == GPU_ONLY and gpu_problem is not None:
        return {"why_not": gpu_problem}
    with ExitStack() as undo:
        if gpu_problem is None:
            undo.enter_context(devices.use(_device(world)))
        try:
            comm = undo.enter_context(create_communicator(name, world))
        except ValueError as error:  # on all ranks
            return {"right": False, "wrong": [], "problem": str(error)}
        found: dict[str, Any] = {"right": True, "wrong": [], "problem": None}
        own = partial(np.full, CHECKED_COUNT, world.rank, np.float32)
        for verb in VERBS if name != GPU_ONLY else VERBS[:-1]:
            if name == NO_OP and verb == MEAN_GRAD:
                _record(found, verb, *is_correct(world, _mean_invocation(comm, own, world.rank)))
            elif world.size >= OPERATIONS[verb].min_ranks:
                arrays = np.empty(CHECKED_COUNT, np.float32), np.empty(CHECKED_COUNT, np.float32)
                _record(
                    found, verb, *is_correct(world, OPERATIONS[verb].make_invocation(comm, *arrays))
                )
        if gpu_problem is None and name != NO_OP:
            mean = (world.size - 1) / 2
            invocation = _mean_invocation(comm, lambda: devices.to_device(own()), mean)
            _record(found, f"{MEAN_GRAD} on GPUs", *is_correct(world, invocation))
        succeeded = found["problem"] is None and not found["wrong"]
        if timed and succeeded and name not in (NO_OP, GPU_ONLY):
            found |= _time(world, comm, MEAN_GRAD)
    return found


def try_device_reduce(world: MPI.Intracomm) -> dict[str, Any]:
    """Sum arrays that lie on GPUs at rank 0, through MPI itself (collective).

    Args:
        world: all ranks.

    Returns:
        ``aware``: whether MPI says, on all ranks, that it takes memory of GPUs; ``why_not``: why
        there is no GPU to try it with; ``right``, where it was tried.
    """
    aware = all(world.allgather(mpi_takes_gpu_memory()))
    problem = next(filter(None, world.allgather(devices.unavailable_reason())), None)
    if problem is not None:
        return {"aware": aware, "why_not": problem}
    if not aware:
        return {"aware": aware}
    with devices.use(_device(world)):
        sent = devices.to_device(np.full(CHECKED_COUNT, world.rank, np.float64))
        total = devices.to_device(np.zeros(CHECKED_COUNT))
        devices.current_stream().synchronize()  # MPI knows nothing of streams
        world.Reduce(sent, total)
        right = world.rank != 0 or bool(
            (devices.to_host(total) == world.size * (world.size - 1) / 2).all()
        )
    return {"aware": aware, "right": all(world.allgather(right))}


def _time(world: MPI.Intracomm, comm: CommunicatorBase, verb: str) -> dict[str, Any]:
    """Return the rates of an operation, and of a copy by all ranks at once, timed in turns."""
    count = COUNT // world.size * world.size
    arrays = np.empty(count, np.float32), np.empty(count, np.float32)
    operation = OPERATIONS[verb]
    invocations = [one.make_invocation(comm, *arrays) for one in (operation, BASELINES["memcpy"])]
    (times, copies), _ = time_all(world, invocations, TIMED_SECONDS)
    found: dict[str, Any] = {"right": times.correct, "problem": times.problem}
    if times.seconds and copies.seconds:
        nbytes = arrays[0].nbytes
        found["bytes_per_second"] = round(
            nbytes * operation.transfers_per_call / min(times.seconds)
        )
        found["copied_bytes_per_second"] = round(nbytes / min(copies.seconds))
    return found


def _record(found: dict[str, Any], verb: str, right: bool, problem: str | None) -> None:
    if problem is not None:
        found["problem"] = found["problem"] or f"{verb}: {problem}"
    elif not right:
        found["wrong"].append(verb)
    found["right"] = found["right"] and right


def _mean_invocation(comm: CommunicatorBase, make: Callable[[], Any], mean: float) -> Invocation:
    """Return a mean of gradients that ``make`` gives; all of it must be ``mean``."""
    parameter = SimpleNamespace(data=None, grad=None)
    model = SimpleNamespace(namedparams=lambda: iter([("/w", parameter)]))

    def prepare() -> None:
        parameter.data = parameter.grad = make()

    def call() -> Any:
        comm.multi_node_mean_grad(model)
        return parameter.grad

    return Invocation(prepare, call, lambda grad: bool(np.allclose(_to_host(grad), mean)))


def _to_host(array: Any) -> np.ndarray:
    return devices.to_host(array) if devices.on_gpu(array) else array


def _own_gpu_problem(world: MPI.Intracomm) -> str | None:
    """Return why not every rank has a GPU to itself; None if it has."""
    problem: str | None = next(filter(None, world.allgather(devices.unavailable_reason())), None)
    if problem is not None:
        return problem
    with devices.use(_device(world)):
        ids = world.allgather((socket.gethostname(), devices.bus_id()))
    return None if len(set(ids)) == len(ids) else "there are fewer GPUs than ranks"


def _device(world: MPI.Intracomm) -> int:
    import cupy

    return int(world.rank % cupy.cuda.runtime.getDeviceCount())
