"""The watchdog's inside: what ranks record, what is read of it, and the job that they make."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from chainermn_comm.watchdog.diagnosis import Rank, WaitGraph
from chainermn_comm.watchdog.monitor.local_ranks import MonitoredRank
from chainermn_comm.watchdog.processes import GONE, RUNNING, STOPPED
from chainermn_comm.watchdog.rank import recorder
from chainermn_comm.watchdog.status_region import (
    COLLECTIVE,
    FINALIZE,
    HEADER,
    IDLE,
    MESSAGE,
    NOBODY,
    REGION_BYTES,
    WORLD,
    Call,
    read_calls,
)
from chainermn_comm.watchdog.timeout import Timeout

__all__ = [
    "COLLECTIVE",
    "FINALIZE",
    "MESSAGE",
    "NOBODY",
    "WORLD",
    "Call",
    "MonitoredRank",
]


def clock() -> float:
    """The clock of the watchdog's times."""
    return time.monotonic()


def communicator_within(name: str, seconds: float = 600.0, **others):
    """A communicator with another time-out, which reports and ends nothing by default.

    Args:
        name: as `create_communicator` takes it.
        seconds: after which a waiting call is reported.
        others: the other attributes of `Timeout`.
    """
    from chainermn_comm.named_communicators import CLASSES  # it starts MPI

    return CLASSES[name](_timeout=Timeout(seconds, **others))


def description(world: int) -> dict[str, Any]:
    """What a monitor must know of this process as a rank."""
    region = recorder.region()
    return {
        "world": world,
        "pid": os.getpid(),
        "files": [region.file, region.stacks],
    }


def monitored(described: dict[str, Any]) -> MonitoredRank:
    """The rank of such a process, as if it had sent its files."""
    folder = f"/proc/{described['pid']}/fd"
    files = [os.open(f"{folder}/{file}", os.O_RDONLY) for file in described["files"]]
    return MonitoredRank(described, *files)


def record(communicator: int, rank: int, size: int):
    """Where this process's calls on a communicator are recorded; to be released."""
    return recorder.allocate(communicator, rank, size)


def recorded_calls() -> list[Call]:
    """The calls that this process has recorded."""
    return read_calls(recorder.region().memory, clock())


def recorded_progress() -> tuple[int, ...]:
    """The updates that this process has made, and their examples."""
    return HEADER.unpack_from(recorder.region().memory)[1:]


class Neighbour:
    """What rank 0 waits in, as another process sees it."""

    def __init__(self, world):
        pid, file = world.bcast((os.getpid(), recorder.region().file))
        with Path(f"/proc/{pid}/fd/{file}").open("rb") as opened:
            self._region = mmap.mmap(opened.fileno(), REGION_BYTES, prot=mmap.PROT_READ)

    def waits_in(self) -> list[Call]:
        found = read_calls(self._region, clock())
        return [call for call in found if call.waits and call.communicator != WORLD]

    def seen_waiting(self) -> Call:
        """The call that it waits in, once it does; the test's own time-out ends this."""
        while not (found := self.waits_in()) or not found[0].operation:  # written last
            time.sleep(0.001)
        (call,) = found
        return call


def monitors_of(ranks: set[str]) -> list[psutil.Process]:
    """The monitors of the jobs that have these ranks."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if ranks & set(words) and is_monitor(words):
            found.append(process)
    return found


def is_monitor(words: list[str]) -> bool:
    """Whether this is the command line of a monitor."""
    return any("chainermn_comm.watchdog.monitor" in word for word in words)


__all__ = ["GONE", "STOPPED", "Rank", "Timeout"]

# Communicators: of all three, and of some of them.
WHOLE = 1
PART = 2


def call(
    rank: int,
    state: int,
    sequence: int = 5,
    peer: int = NOBODY,
    tag: int = NOBODY,
    operation: str = "bcast",
    of: int = WHOLE,
    size: int = 3,
) -> Call:
    return Call(of, rank, size, state, 7.0, sequence, 0, peer, tag, operation)


def inside(rank: int, sequence: int = 5, **options) -> Call:
    """A collective call that the rank waits in."""
    return call(rank, COLLECTIVE, sequence, **options)


def outside(rank: int, sequence: int = 4, **options) -> Call:
    """The collective call that the rank was in last."""
    return call(rank, IDLE, sequence, **options)


def receiving(
    rank: int, source: int, tag: int = 0, sequence: int = 4, **options
) -> Call:
    return call(rank, MESSAGE, sequence, source, tag, "recv", **options)


def sending(rank: int, dest: int, tag: int = 0, sequence: int = 4) -> Call:
    return call(rank, MESSAGE, sequence, dest, tag, "send")


ENDED = call(0, COLLECTIVE, 0, operation=FINALIZE, of=WORLD, size=1)


def ranks(
    *calls: Call | tuple[Call, ...], states: dict[int, str] | None = None
) -> list[Rank]:
    """Ranks from 0 on that are in these calls, and run unless it is said otherwise."""
    return [
        Rank(
            world,
            "here",
            100 + world,
            (states or {}).get(world, RUNNING),
            those if isinstance(those, tuple) else (those,),
        )
        for world, those in enumerate(calls)
    ]


def job_of(them: Iterable[Rank], silent: Iterable[str] = ()) -> WaitGraph:
    """The job of these ranks, and of hosts that don't answer."""
    return WaitGraph(them, silent)
