"""Watches over the first communicator, which brings the ranks together that a monitor watches.

Until it is made nobody knows who is where, so each rank that waits for it keeps a thread; mpi4py
lets threads run meanwhile. Of a machine's ranks the first that has come speaks. It finds the
others by the variable that tells each its number, and those that have come by the file where
they note their recorder.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..events import emit
from . import processes, recorder
from .diagnosis import Job, Rank
from .report import last_words, reason, report, warning
from .status_region import AREA_BYTES, EVERYBODY, Call, read
from .timeout import Limit

# In which MPICH, Open MPI and Slurm tell a process its rank.
VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
# From a report to the end, for the launcher to forward it; ranks that don't speak wait for longer.
SPEAKER_SECONDS, OTHERS_SECONDS = 0.5, 2.0


@contextlib.contextmanager
def arriving(limit: Limit, members: list[int], end: Callable[[], None]) -> Iterator[None]:
    """Report, and end the job if asked, when the ranks don't all come in time.

    Args:
        limit: how long it may take.
        members: the ranks that have to come, by their numbers in MPI.COMM_WORLD; this one first.
        end: ends the job.
    """
    done = threading.Event()
    with contextlib.suppress(OSError):
        if limit.seconds and len(members) > 1 and not recorder.area().watched:
            threading.Thread(target=_watch, args=(done, limit, members, end), daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _watch(
    done: threading.Event, limit: Limit, members: list[int], end: Callable[[], None]
) -> None:
    if done.wait(limit.seconds / 2):
        return
    job = _here(members)
    if _speaks(job, members):
        mine = job.ranks[members[0]]
        _say(warning(job, mine, mine.waits[0], limit.seconds))
    if done.wait(limit.seconds / 2):
        return
    job = _here(members)
    speaks = _speaks(job, members)
    if speaks:
        waiting = [(rank, call) for rank in job.ranks.values() for call in rank.waits]
        text = report(job, waiting, last_words(limit.seconds, limit.ends_job))
        if limit.ends_job:
            emit("watchdog_abort", reason=reason(text))
        _say(text)
    if limit.ends_job and not done.wait(SPEAKER_SECONDS if speaks else OTHERS_SECONDS):
        end()


def _speaks(job: Job, members: list[int]) -> bool:
    """Whether this rank is the first of this machine's that wait."""
    waiting = [world for world, rank in job.ranks.items() if rank.waits]
    return waiting != [] and min(waiting) == members[0]


def _here(members: list[int]) -> Job:
    """The members on this machine, and what those do that have come."""
    now = time.monotonic()
    found = {}
    for world, pid in sorted(_ranks().items()):
        if world in members:
            birth = processes.born(pid)
            state = processes.state(pid, birth)
            found[world] = Rank(world, os.uname().nodename, pid, state, _calls(pid, now))
    mine = members[0]
    host = os.uname().nodename
    found[mine] = Rank(mine, host, os.getpid(), processes.RUNNING, _calls(os.getpid(), now))
    return Job(found.values())


def _ranks() -> dict[int, int]:
    """Processes of this job on this machine, by rank: those that its launcher has started."""
    name = next((name for name in VARIABLES if name in os.environ), None)
    if name is None:
        return {}
    launcher = os.getppid()
    while _value(launcher, name) is not None:  # it is a script between
        launcher = processes.parent(launcher)
    found: dict[int, int] = {}
    everyone = processes.numbers()
    parents = {pid: processes.parent(pid) for pid in everyone}
    todo = [pid for pid in everyone if parents[pid] == launcher]
    while todo:
        pid = todo.pop()
        world = _value(pid, name)
        if world is not None:
            if world not in found or (_area_of(pid) and not _area_of(found[world])):
                found[world] = pid
            todo += [child for child in everyone if parents[child] == pid]
    return found


def _value(pid: int, name: str) -> int | None:
    digits = processes.variable(pid, name)
    return int(digits) if digits.isdecimal() else None


def _area_of(pid: int) -> Path | None:
    """The file where a process notes its calls, if it has come so far."""
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                about = os.stat(file)
                if (about.st_nlink, about.st_size) == (0, AREA_BYTES):
                    return file
    return None


def _calls(pid: int, now: float) -> tuple[Call, ...]:
    path = _area_of(pid)
    if path is None:
        return ()
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        area = mmap.mmap(file.fileno(), AREA_BYTES, prot=mmap.PROT_READ)
        return tuple(call for call in read(area, now) if call.communicator == EVERYBODY)
    return ()


def _say(text: str) -> None:
    processes.write(2, text, 2.0)
