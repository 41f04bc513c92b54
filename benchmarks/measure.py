"""Times cases in turn on this rank, and tells what their first calls add to its memory."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peers
from mpi4py import MPI

NAP_SECONDS = 0.0005
# Calls before any is counted: a way in a node is used four times before it is compared.
WARM_UP_CALLS = 10


def measure(
    cases: list[peers.Case],
    comm: MPI.Intracomm,
    rounds: int,
    realtime: bool,
    warm_up: int = WARM_UP_CALLS,
) -> list[dict[str, Any]]:
    """Time the cases in turn, each once a round (collective).

    It is called twice then, and the second call counts: as in a loop, its code and what it
    works on lie in the caches, whoever's turn was before.

    Returns:
        For each its name and kind; ``ms``, of a round's slowest rank, for each round;
        ``right``, whether the results of its first and last calls were; ``extra_bytes``,
        the most that its first call added to a rank's memory, or None where unknown.
    """
    extra, right = [], []
    for case in cases:
        before = forget_peak()
        time_one(case, comm, realtime)  # not counted: the first call allocates
        grown = comm.allgather(peak() - before if before else None)
        extra.append(None if None in grown else max(grown))
        right.append(case.right())
    seconds = np.zeros((rounds, len(cases)))
    gc.collect()
    gc.disable()
    for case in cases:
        for _ in range(warm_up):
            time_one(case, comm, realtime)
    for turn, i in np.ndindex(seconds.shape):
        time_one(cases[i], comm, realtime)
        seconds[turn, i] = time_one(cases[i], comm, realtime)
        if turn == rounds - 1:
            right[i] &= cases[i].right()
    gc.enable()
    comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    return [
        {
            "name": case.name,
            "kind": case.kind,
            "ms": (seconds[:, i] * 1e3).round(6).tolist(),
            "right": right[i],
            "extra_bytes": extra[i],
        }
        for i, case in enumerate(cases)
    ]


def time_one(case: peers.Case, comm: MPI.Intracomm, realtime: bool) -> float:
    """Seconds that one call took on this rank."""
    case.prepare()
    call = case.call if comm.rank == 0 or not case.alone else None
    with priority(realtime):
        return time_call(call, comm, sleeps=case.alone)


def time_call(call: Callable[[], Any] | None, comm: MPI.Intracomm, sleeps: bool) -> float:
    """Return the seconds that a call took on this rank, which all ranks begin together.

    Args:
        call: None on ranks that have nothing to do.
        comm: all ranks.
        sleeps: whether ranks sleep until all are done; in a barrier they would keep a core busy.
    """
    comm.Barrier()
    took = 0.0
    if call is not None:
        start = time.perf_counter()
        _kept = call()  # what it returned is freed after the time was taken
        took = time.perf_counter() - start
    if sleeps:
        done = comm.Ibarrier()
        while not done.Test():
            time.sleep(NAP_SECONDS)
    return took


@contextlib.contextmanager
def priority(realtime: bool) -> Iterator[None]:
    """Let nothing else have this rank's core meanwhile, if wanted.

    Only for the milliseconds of one call: what shares the machine should hardly notice.
    """
    if not realtime:
        yield
        return
    _schedule(os.SCHED_RR, 1)
    try:
        yield
    finally:
        _schedule(os.SCHED_OTHER, 0)


def _schedule(policy: int, level: int) -> None:
    # Every thread by itself: gloo's does the work while the main one waits.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread), policy, os.sched_param(level))


def forget_peak() -> int:
    """Let the peak of this process's memory begin anew.

    Returns:
        The bytes it holds now, or 0 where Linux doesn't let us.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return _status("VmRSS")


def peak() -> int:
    """The most bytes that this process held since `forget_peak`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
