"""What ranks try with messages and communicators; every value that arrives is checked.

Only ranks may import it: that starts MPI.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from chainermn_comm import CommunicatorBase, create_communicator, devices
from chainermn_tools.bench.operations import BASELINES, MEAN_GRAD, OPERATIONS, Invocation, Model
from chainermn_tools.bench.timing import NAP_SECONDS, is_correct, time_all
from chainermn_tools.bench.values import fill_pattern, matches_pattern
from chainermn_tools.doctor.ranks.gpu_tests import GPU_ONLY, own_device, own_gpu_problem

if TYPE_CHECKING:
    from mpi4py import MPI

# Elements of the gradients that are timed: more than caches hold, and still a moment's work.
COUNT = 4 << 20
CHECKED_COUNT = 12345
TIMED_SECONDS = 0.2
CHECKED = ("send", "bcast", "allreduce", MEAN_GRAD)
# The communicator that exchanges nothing, and leaves gradients as they are.
NO_OP = "dummy"
# Elements of a message between hosts: more than any switch or MPI sends at once.
MESSAGE_COUNT = 1 << 20
ROUNDS = 2  # of such a message, there and back; the faster one counts, since the first connects


def try_messages(world: MPI.Intracomm) -> dict[str, Any]:
    """Send messages through MPI itself, from rank 0 to the last and back (collective).

    Return ``correct``: whether they arrived as they were; ``problem``: what was raised, or None;
    ``bytes_per_second`` of them and ``copied_bytes_per_second`` of a copy in memory.
    """
    if world.size == 1:
        return {"correct": True, "problem": None}
    with create_communicator("naive", world) as comm:
        return _time(world, comm, "send")


def try_communicator(world: MPI.Intracomm, name: str, timed: bool = True) -> dict[str, Any]:
    """Try a communicator on NumPy arrays, and on GPUs where each rank has one (collective).

    Return ``wrong``: operations that gave wrong values, on any rank; ``problem``: what was raised;
    ``reason``: why it can't be made here; where a mean of large gradients is ``timed``, too, rates
    as of :func:`try_messages`.
    """
    gpu_problem = own_gpu_problem(world)
    if name == GPU_ONLY and gpu_problem is not None:
        return {"reason": gpu_problem}
    with contextlib.ExitStack() as undo:
        if gpu_problem is None:
            undo.enter_context(devices.use(own_device(world)))
        try:
            comm = undo.enter_context(create_communicator(name, world))
        except ValueError as error:  # on all ranks
            return {"correct": False, "wrong": [], "problem": str(error)}
        found: dict[str, Any] = {"wrong": [], "problem": None}
        own = partial(np.full, CHECKED_COUNT, world.rank, np.float32)
        invocations: dict[str, Invocation] = {}
        for operation in CHECKED if name != GPU_ONLY else CHECKED[:-1]:
            if name == NO_OP and operation == MEAN_GRAD:
                invocations[operation] = _mean_invocation(comm, own, world.rank)
            elif world.size >= OPERATIONS[operation].min_ranks:
                arrays = _arrays(CHECKED_COUNT)
                invocations[operation] = OPERATIONS[operation].make_invocation(comm, *arrays)
        if gpu_problem is None and name != NO_OP:
            mean = (world.size - 1) / 2
            on_gpu = _mean_invocation(comm, lambda: devices.to_device(own()), mean)
            invocations[f"{MEAN_GRAD} on GPUs"] = on_gpu
        for operation, invocation in invocations.items():
            correct, problem = is_correct(world, invocation)
            if problem is not None:
                found["problem"] = found["problem"] or f"{operation}: {problem}"
            elif not correct:
                found["wrong"].append(operation)
        found["correct"] = found["problem"] is None and not found["wrong"]
        if timed and found["correct"] and name not in (NO_OP, GPU_ONLY):
            found |= _time(world, comm, MEAN_GRAD)
    return found


def _time(world: MPI.Intracomm, comm: CommunicatorBase, name: str) -> dict[str, Any]:
    """Return the rates of an operation, and of a copy by all ranks at once, timed in turns."""
    count = COUNT // world.size * world.size
    arrays, operation = _arrays(count), OPERATIONS[name]
    invocations = [one.make_invocation(comm, *arrays) for one in (operation, BASELINES["memcpy"])]
    (times, copies), _ = time_all(world, invocations, TIMED_SECONDS)
    found: dict[str, Any] = {"correct": times.correct, "problem": times.problem}
    if times.seconds and copies.seconds:
        nbytes, transfers = arrays[0].nbytes, operation.transfers_per_call
        found["bytes_per_second"] = round(nbytes * transfers / min(times.seconds))
        found["copied_bytes_per_second"] = round(nbytes / min(copies.seconds))
    return found


def _arrays(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an array to send, and one to receive in."""
    return np.empty(count, np.float32), np.empty(count, np.float32)


def _mean_invocation(comm: CommunicatorBase, make: Callable[[], Any], mean: float) -> Invocation:
    """Return a mean of gradients that ``make`` gives; all of it must be ``mean``."""
    model = Model(None)

    def prepare() -> None:
        model.data = model.grad = make()

    def call() -> Any:
        comm.multi_node_mean_grad(model)
        return model.grad

    def is_mean(grad: Any) -> bool:
        return np.allclose(devices.to_host(grad) if devices.on_gpu(grad) else grad, mean)

    return Invocation(prepare, call, is_mean)


def exchange_messages(
    world: MPI.Intracomm,
    hosts: Sequence[str],
    pairs: Sequence[tuple[str, str]],
    report: Callable[..., None],
) -> None:
    """Send a large message there and back between each two hosts, one pair at a time (collective).

    The first host's rank reports ``pair=[a, b]`` and what was found: ``correct``, the ``seconds``
    of a message, and its number of ``bytes``.
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
            done = world.Ibarrier()  # keeps no core busy
            while not done.Test():
                time.sleep(NAP_SECONDS)


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
