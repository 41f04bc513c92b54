"""What ranks do, and did within the last seconds: rates and shares, from many readings."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import psutil  # type: ignore[import-untyped]

from chainermn_comm.watchdog.diagnosis import Rank, WaitGraph
from chainermn_comm.watchdog.processes import RUNNING
from chainermn_tools.formatting import format_duration, join_first
from chainermn_tools.live.job import LiveJob, ask

WAITING, WIRE, COMPUTING = "waiting", "on the wire", "computing"
SUMMARY_SECONDS, MOST_READINGS = 2.0, 50
# Between two readings, and at least as a multiple of what one takes from a core of the
# ranks.
PAUSE_SECONDS, PAUSE_TIMES = 0.2, 50

# When, all ranks, what each did, and those that others waited for, the likeliest first.
Reading = tuple[float, WaitGraph, dict[int, dict[str, Any]], list[int]]


def activity(graph: WaitGraph, rank: Rank) -> dict[str, Any]:
    """Return what a rank does, since when, inside or after which operation, and for whom."""
    whom = {other.world for call in rank.waits for other in graph.waits_for(rank, call)}
    have_come = not whom and not any(map(graph.num_unknown, rank.waits))
    doing = (WIRE if have_come else WAITING) if rank.waits else COMPUTING
    if rank.has_finished or rank.state != RUNNING:
        doing = "ended" if rank.has_finished else rank.state
    last = min(
        (it for it in rank.calls if it.operation), key=lambda it: it.age, default=None
    )
    call = max(rank.waits, key=lambda it: it.age, default=last)
    found = {"doing": doing, "is_inside": bool(rank.waits), "waits_for": sorted(whom)}
    return {**found, "operation": call and call.operation, "seconds": call and call.age}


def in_words(now: dict[str, Any]) -> str:
    """Return an `activity` in words, such as "waiting 2 s in update for 1, 3"."""
    named, where = (
        join_first(now["waits_for"], 4),
        "in" if now["is_inside"] else "after",
    )
    since = () if now["seconds"] is None else (format_duration(now["seconds"]), where)
    words = now["doing"], *since, now["operation"], *["for", named] * bool(named)
    return " ".join(filter(None, words))


def read(graph: WaitGraph, now: float) -> Reading:
    """Return the reading of the time ``now``, in seconds."""
    waits = [(rank, call) for rank in graph.ranks.values() for call in rank.waits]
    causes = [rank.world for rank in graph.root_causes(waits)]
    did = {world: activity(graph, rank) for world, rank in graph.ranks.items()}
    return now, graph, did, causes


def summaries(job: LiveJob, sort: str) -> Iterator[dict[str, Any]]:
    """Yield every two seconds what the ranks do, and did in the last ten or more."""
    readings, last = deque[Reading](maxlen=MOST_READINGS), time.monotonic()
    while now := time.monotonic():
        readings.append(read(ask(job, "calls"), now))
        if now - last > SUMMARY_SECONDS:
            last = now
            yield {"job": job.number, "command": job.command, **summary(readings, sort)}
        pause = min(PAUSE_TIMES * (time.monotonic() - now), SUMMARY_SECONDS)
        time.sleep(max(PAUSE_SECONDS, pause))


def summary(readings: Sequence[Reading], sort: str = "rank") -> dict[str, Any]:
    """Return what all ranks do and did; the largest first where it isn't sorted by rank."""
    _, graph, _, causes = readings[-1]
    ranks = [_summary_of(rank, readings) for _, rank in sorted(graph.ranks.items())]
    most = max(ranks, key=lambda it: (it["waited_for"], it["rank"] in causes[:1]))
    ranks.sort(key=lambda it: it["rank"] if sort == "rank" else -(it[sort] or 0.0))
    found = {"slowest": most["rank"] if most["waited_for"] else None, "ranks": ranks}
    return {**found, "unseen": graph.unreachable}


def _summary_of(rank: Rank, readings: Sequence[Reading]) -> dict[str, Any]:
    readings = [it for it in readings if rank.world in it[2]]
    doing = [did[rank.world]["doing"] for _, _, did, _ in readings]
    memory = None
    with suppress(psutil.Error):
        if rank.host == os.uname().nodename:
            memory = psutil.Process(rank.pid).memory_info().rss
    return {
        **{
            "rank": rank.world,
            "host": rank.host,
            "pid": rank.pid,
            "memory_bytes": memory,
        },
        **readings[-1][2][rank.world],
        "steps_per_second": _rate(readings, rank, "updates"),
        "examples_per_second": _rate(readings, rank, "examples"),
        "waiting": doing.count(WAITING) / len(doing),
        "wire": doing.count(WIRE) / len(doing),
        "waited_for": sum(rank.world in causes for *_, causes in readings) / len(doing),
    }


def _rate(readings: Sequence[Reading], rank: Rank, of: str) -> float | None:
    """Return how many a second there were of what a rank counts; None if there were none."""
    (began, first, *_), (ended, last, *_) = readings[0], readings[-1]
    number = getattr(last.ranks[rank.world], of) - getattr(first.ranks[rank.world], of)
    return number / (ended - began) if number and ended > began else None
