"""Watches the making of the first communicator, which brings the ranks together for a monitor.

Until then no rank knows where others are, so each that waits keeps a thread; mpi4py lets threads
run. The first of a machine's ranks that has come reports. It finds the others by the variable with
each one's number, and those that have come by the anonymous file of their status region.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from _chainermn_events import RANK_VARIABLES, emit

from ...timeout import Timeout
from .. import processes
from ..diagnosis import Rank, WaitGraph, Waits
from ..report import next_step, reason, report, warning
from ..status_region import REGION_BYTES, WORLD, Call, read_calls
from . import recorder

# The variables in which launchers put a process's rank. Here MPI is running, so Slurm's may count.
RANK_NAMES = (*(rank for rank, _ in RANK_VARIABLES), "SLURM_PROCID")
# From a report to the end, for the launcher to forward it; the other ranks wait for longer.
REPORTER_SECONDS, OTHERS_SECONDS = 0.5, 2.0


@contextlib.contextmanager
def enforce_init_timeout(
    timeout: Timeout, members: list[int], abort: Callable[[], None]
) -> Iterator[None]:
    """Report, and end the job by ``abort`` if asked, when the ranks don't all come in time.

    ``members`` have to come, by their numbers in MPI.COMM_WORLD; this rank is the first of them.
    """
    done = threading.Event()

    def watch() -> None:
        for time_is_over in (False, True):
            if done.wait(timeout.seconds / 2):
                return
            graph, waiting, is_reporter = _local_ranks(members)
            if is_reporter and time_is_over:
                text = report(graph, waiting, next_step(timeout))
                if timeout.ends_job:
                    emit("watchdog_abort", reason=reason(text))
                processes.write(2, text, 2.0)
            elif is_reporter:
                processes.write(2, warning(graph, *waiting[0], timeout.seconds), 2.0)
        if timeout.ends_job and not done.wait(REPORTER_SECONDS if is_reporter else OTHERS_SECONDS):
            abort()

    with contextlib.suppress(OSError):
        if timeout.seconds and len(members) > 1 and not recorder.region().is_monitored:
            threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _local_ranks(members: list[int]) -> tuple[WaitGraph, Waits, bool]:
    """Return the members here, calls in which they wait, and if this is the first that has come."""
    now = time.monotonic()
    host = os.uname().nodename
    pids, awaited = {**_pids_by_rank(), members[0]: os.getpid()}, set(members)
    graph = WaitGraph(
        Rank(world, host, pid, processes.state((pid, processes.start_time(pid))), _calls(pid, now))
        for world, pid in sorted(pids.items())
        if world in awaited
    )
    waiting = [(rank, call) for rank in graph.ranks.values() for call in rank.waits]
    return graph, waiting, bool(waiting) and waiting[0][0].world == members[0]


def _pids_by_rank() -> dict[int, int]:
    """Return the processes of this job on this machine: those that its launcher has started."""
    name = next((name for name in RANK_NAMES if name in os.environ), None)
    if name is None:
        return {}
    launcher = os.getppid()
    while _rank_of(launcher, name) is not None:  # it is a script between
        launcher = processes.parent(launcher)
    found: dict[int, int] = {}
    parents = {pid: it.parent for pid, it in processes.all_stats().items()}
    todo = [pid for pid in parents if parents[pid] == launcher]
    while todo:
        pid = todo.pop()
        world = _rank_of(pid, name)
        if world is not None:
            if world not in found or (_region_file(pid) and not _region_file(found[world])):
                found[world] = pid
            todo += [child for child in parents if parents[child] == pid]
    return found


def _rank_of(pid: int, name: str) -> int | None:
    digits = processes.env_variable(pid, name)
    return int(digits) if digits.isdecimal() else None


def _region_file(pid: int) -> Path | None:
    """Return the file of a process's status region, if it has come so far."""
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                about = os.stat(file)
                if (about.st_nlink, about.st_size) == (0, REGION_BYTES):
                    return file
    return None


def _calls(pid: int, now: float) -> tuple[Call, ...]:
    path = _region_file(pid)
    if path is None:
        return ()
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        region = mmap.mmap(file.fileno(), REGION_BYTES, prot=mmap.PROT_READ)
        return tuple(call for call in read_calls(region, now) if call.communicator == WORLD)
    return ()
