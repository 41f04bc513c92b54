"""What ranks try with messages and communicators; every value that arrives is checked.

Only ranks may import it: that starts MPI.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from chainermn_comm import CommunicatorBase, create_communicator
from chainermn_comm.gpu import devices
from chainermn_tools.bench.operations import (
    BASELINES,
    MEAN_GRAD,
    OPERATIONS,
    Invocation,
    Model,
)
from chainermn_tools.bench.timing import idle_barrier, is_correct, time_all
from chainermn_tools.bench.values import fill_pattern, matches_pattern

if TYPE_CHECKING:
    from mpi4py import MPI

# Elements of the gradients that are timed: more than caches hold, and still a moment's
# work.
COUNT = 4 << 20
CHECKED_COUNT = 12345
TIMED_SECONDS = 0.2
CHECKED = ("send", "bcast", "allreduce", MEAN_GRAD)
# The communicator that exchanges nothing, and leaves gradients as they are.
NO_OP = "dummy"
GPU_ONLY = "pure_nccl"
# Those that need no GPU for each rank.
SHARING_GPUS = ("naive", "flat", NO_OP)
# Of gradients on GPUs: dtypes and elements, some more than a chunk has.
GPU_GRADIENTS = (("f4", 12345), ("f2", 999), ("f8", 1), ("f4", 9 << 20))
# A call may return before its work is over, and raise its errors in the next one.
GPU_CALLS = 3
# Elements of a message between hosts: more than any switch or MPI sends at once.
MESSAGE_COUNT = 1 << 20
# Of such a message, there and back; the faster one counts, since the first connects.
ROUNDS = 2


def try_messages(world: MPI.Intracomm) -> dict[str, Any]:
    """Send messages through MPI itself, from rank 0 to the last and back (collective).

    Return ``correct``: whether they arrived as they were; ``problem``: what was raised,
    or None; ``bytes_per_second`` of them and ``copied_bytes_per_second`` of a copy in
    memory.
    """
    if world.size == 1:
        return {"correct": True, "problem": None}
    with create_communicator("naive", world) as comm:
        return _time(world, comm, "send")


def try_communicator(
    world: MPI.Intracomm, name: str, timed: bool = True
) -> dict[str, Any]:
    """Try a communicator on NumPy arrays, and on GPUs if each rank has one (collective).

    Return ``wrong``: operations that gave wrong values, on any rank; ``problem``: what
    was raised; ``reason``: why it can't be made here; where a mean of large gradients
    is ``timed``, too, rates as of :func:`try_messages`.
    """
    no_gpus = _gpu_problem(world, name)
    if name == GPU_ONLY and no_gpus is not None:
        return {"reason": no_gpus}
    with contextlib.ExitStack() as undo:
        if no_gpus is None:
            undo.enter_context(devices.use(_own_device(world)))
        try:
            comm = undo.enter_context(create_communicator(name, world))
        except ValueError as error:  # on all ranks
            return {"correct": False, "wrong": [], "problem": str(error)}
        found: dict[str, Any] = {"wrong": [], "problem": None}
        invocations: list[tuple[str, Invocation]] = []
        for operation in CHECKED if name != GPU_ONLY else CHECKED[:-1]:
            if name == NO_OP and operation == MEAN_GRAD:
                invocations.append(
                    (operation, _mean_invocation(comm, _host_gradients, world.rank))
                )
            elif world.size >= OPERATIONS[operation].min_ranks:
                make = OPERATIONS[operation].make_invocation
                invocations.append((operation, make(comm, *_arrays(CHECKED_COUNT))))
        if no_gpus is None and name != NO_OP:
            mean = _mean_invocation(comm, _gpu_gradients, (world.size - 1) / 2)
            invocations += [(f"{MEAN_GRAD} on GPUs", mean)] * GPU_CALLS
        for operation, invocation in invocations:
            correct, problem = is_correct(world, invocation)
            if problem is not None:
                found["problem"] = f"{operation}: {problem}"
                break
            if not correct and operation not in found["wrong"]:
                found["wrong"].append(operation)
        found["correct"] = found["problem"] is None and not found["wrong"]
        if timed and found["correct"] and name not in (NO_OP, GPU_ONLY):
            found |= _time(world, comm, MEAN_GRAD)
    return found


def _time(world: MPI.Intracomm, comm: CommunicatorBase, name: str) -> dict[str, Any]:
    """Return the rates of an operation, and of a copy by all ranks at once, timed in turns."""
    count = COUNT // world.size * world.size
    arrays, operation = _arrays(count), OPERATIONS[name]
    invocations = [
        one.make_invocation(comm, *arrays) for one in (operation, BASELINES["memcpy"])
    ]
    times, copies = time_all(world, invocations, TIMED_SECONDS)
    found: dict[str, Any] = {"correct": times.correct, "problem": times.problem}
    if times.seconds and copies.seconds:
        nbytes = moved = arrays[0].nbytes
        if name == "send":  # there and back
            moved = 2 * nbytes
        found["bytes_per_second"] = round(moved / min(times.seconds))
        found["copied_bytes_per_second"] = round(nbytes / min(copies.seconds))
    return found


def _arrays(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an array to send, and one to receive in."""
    return np.empty(count, np.float32), np.empty(count, np.float32)


def _host_gradients(value: float) -> list[Any]:
    return [np.full(CHECKED_COUNT, value, np.float32)]


def _gpu_gradients(value: float) -> list[Any]:
    import cupy

    return [cupy.asarray(np.full(size, value, dtype)) for dtype, size in GPU_GRADIENTS]


def _mean_invocation(
    comm: CommunicatorBase, make: Callable[[float], list[Any]], mean: float
) -> Invocation:
    """Return a mean of gradients that ``make`` fills with the rank; all of it must be ``mean``."""
    params: list[Model] = []
    model = SimpleNamespace(
        namedparams=lambda: [(f"/{n}", one) for n, one in enumerate(params)]
    )

    def prepare() -> None:
        params[:] = [Model(grad) for grad in make(comm.rank)]

    def call() -> Any:
        comm.multi_node_mean_grad(model)
        return [one.grad for one in params]

    def is_mean(grads: list[Any]) -> bool:
        host = (grad.get() if devices.on_gpu(grad) else grad for grad in grads)
        return all(np.allclose(grad, mean, rtol=1e-3) for grad in host)

    return Invocation(prepare, call, is_mean)


def _gpu_problem(world: MPI.Intracomm, name: str) -> str | None:
    """Return why a rank has no GPU, or shares one, which not all communicators bear."""
    problem = next(filter(None, world.allgather(devices.unavailable_reason())), None)
    if problem is None and name not in SHARING_GPUS:
        with devices.use(_own_device(world)):
            ids = world.allgather((socket.gethostname(), devices.bus_id()))
        if len(set(ids)) < len(ids):
            return "there are fewer GPUs than ranks"
    return problem


def _own_device(world: MPI.Intracomm) -> int:
    import cupy

    return int(world.rank % cupy.cuda.runtime.getDeviceCount())


def exchange_messages(
    world: MPI.Intracomm,
    hosts: Sequence[str],
    pairs: Sequence[tuple[str, str]],
    report: Callable[..., None],
) -> None:
    """Send a large message there and back between each two hosts, one pair at a time (collective).

    The first host's rank reports ``pair=[a, b]`` and what was found: ``correct``, the
    ``seconds`` of a message, and its number of ``bytes``.
    """
    for a, b in pairs:
        if a in hosts and b in hosts:
            first, second = hosts.index(a), hosts.index(b)
            if world.rank == first:
                report(pair=[a, b], **_send_and_return(world, second))
            elif world.rank == second:
                got = np.empty(MESSAGE_COUNT, np.float32)
                for _ in range(ROUNDS):
                    world.Recv(got, first)
                    world.Send(got, first)
            idle_barrier(world)


def _send_and_return(world: MPI.Intracomm, other: int) -> dict[str, Any]:
    """Be the first of a pair; return what :func:`exchange_messages` reports."""
    sent, got = _arrays(MESSAGE_COUNT)
    fill_pattern(sent, world.rank)
    times: list[float] = []
    correct = True
    for _ in range(ROUNDS):
        got.fill(0)
        begin = time.perf_counter()
        world.Send(sent, other)
        world.Recv(got, other)
        times.append((time.perf_counter() - begin) / 2)
        correct = correct and matches_pattern(got, MESSAGE_COUNT, plus=world.rank)
    return {"correct": correct, "seconds": min(times), "bytes": sent.nbytes}
