"""What three ranks do, as the watchdog sees it, and the job that they make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chainermn_comm.watchdog.diagnosis import Rank, WaitGraph
from chainermn_comm.watchdog.processes import GONE, RUNNING, STOPPED
from chainermn_comm.watchdog.status_region import (
    COLLECTIVE,
    FINALIZE,
    IDLE,
    MESSAGE,
    NOBODY,
    WORLD,
    Call,
)
from chainermn_comm.watchdog.timeout import Timeout

__all__ = ["GONE", "STOPPED", "Rank", "Timeout"]

# Communicators: of all three, and of some of them.
WHOLE, PART = 1, 2


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


def inside(rank: int, sequence: int = 5, **options: Any) -> Call:
    """A collective call that the rank waits in."""
    return call(rank, COLLECTIVE, sequence, **options)


def outside(rank: int, sequence: int = 4, **options: Any) -> Call:
    """The collective call that the rank was in last."""
    return call(rank, IDLE, sequence, **options)


def receiving(
    rank: int, source: int, tag: int = 0, sequence: int = 4, **options: Any
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
