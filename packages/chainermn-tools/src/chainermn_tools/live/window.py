"""What ranks do now, and did within the last seconds: rates and shares from many readings."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]

from chainermn_comm.watchdog.diagnosis import Rank, WaitGraph
from chainermn_comm.watchdog.processes import RUNNING
from chainermn_tools.formatting import format_duration, join_first
from chainermn_tools.live.running_jobs import LiveJob, ask

WAITING = "waiting"
WIRE = "on the wire"
COMPUTING = "computing"
SUMMARY_SECONDS = 2.0
MOST_READINGS = 50
# The time between two readings: these seconds, or this multiple of the time that a
# reading takes from the ranks' cores.
PAUSE_SECONDS = 0.2
PAUSE_TIMES = 50


class Reading(NamedTuple):
    """The facts at one moment."""

    at: float  # seconds
    graph: WaitGraph
    did: dict[int, dict[str, Any]]  # each rank's `activity`
    causes: list[int]  # the ranks that others waited for, the likeliest first


def activity(graph: WaitGraph, rank: Rank) -> dict[str, Any]:
    """Return what a rank does, since when, inside or after which operation, and for whom."""
    whom = {other.world for call in rank.waits for other in graph.waits_for(rank, call)}
    known = [call for call in rank.calls if call.operation]
    last = min(known, key=lambda call: call.age, default=None)
    call = max(rank.waits, key=lambda call: call.age, default=last)
    found: dict[str, Any] = {
        "doing": COMPUTING,
        "is_inside": bool(rank.waits),
        "waits_for": sorted(whom),
        "operation": None,
        "seconds": None,
    }
    if rank.has_finished:
        found["doing"] = "ended"
    elif rank.state != RUNNING:
        found["doing"] = rank.state
    elif whom or any(map(graph.num_unknown, rank.waits)):
        found["doing"] = WAITING
    elif rank.waits:
        found["doing"] = WIRE
    if call is not None:
        found["operation"] = call.operation
        found["seconds"] = call.age
    return found


def in_words(now: dict[str, Any]) -> str:
    """Return an `activity` in words, such as "waiting 2 s in update for 1, 3"."""
    words = [now["doing"]]
    if now["seconds"] is not None:
        words.append(format_duration(now["seconds"]))
        words.append("in" if now["is_inside"] else "after")
    if now["operation"]:
        words.append(now["operation"])
    if now["waits_for"] and now["doing"] == WAITING:
        words += ["for", join_first(now["waits_for"], 4)]
    return " ".join(words)


def read(graph: WaitGraph, now: float) -> Reading:
    """Return the reading of the time ``now``, in seconds."""
    waits = [(rank, call) for rank in graph.ranks.values() for call in rank.waits]
    causes = [rank.world for rank in graph.root_causes(waits)]
    did = {world: activity(graph, rank) for world, rank in graph.ranks.items()}
    return Reading(now, graph, did, causes)


def summaries(job: LiveJob, sort: str) -> Iterator[dict[str, Any]]:
    """Yield every two seconds what the ranks do now, and did in the last ten seconds or more."""
    readings: deque[Reading] = deque(maxlen=MOST_READINGS)
    last = time.monotonic()
    while True:
        now = time.monotonic()
        readings.append(read(ask(job, "calls"), now))
        if now - last > SUMMARY_SECONDS:
            last = now
            yield {"job": job.number, "command": job.command, **summary(readings, sort)}
        pause = min(PAUSE_TIMES * (time.monotonic() - now), SUMMARY_SECONDS)
        time.sleep(max(PAUSE_SECONDS, pause))


def summary(readings: Sequence[Reading], sort: str = "rank") -> dict[str, Any]:
    """Return what all ranks do and did; unless sorted by rank, the largest value comes first."""
    graph = readings[-1].graph
    if not graph.ranks:  # the first reading is about to come
        return {"slowest": None, "ranks": [], "unseen": graph.unreachable}
    likeliest = readings[-1].causes[:1]
    ranks = [_summary_of(rank, readings) for _, rank in sorted(graph.ranks.items())]
    most = max(ranks, key=lambda row: (row["waited_for"], row["rank"] in likeliest))
    if sort != "rank":
        ranks.sort(key=lambda row: -(row[sort] or 0.0))
    slowest = None
    rivals = [row for row in ranks if row["waited_for"] == most["waited_for"]]
    # Ranks that were waited for all the time hang, and the likeliest culprit is one of
    # them.
    if most["waited_for"] == 1.0 or (most["waited_for"] and len(rivals) == 1):
        slowest = most["rank"]
    return {"slowest": slowest, "ranks": ranks, "unseen": graph.unreachable}


def _summary_of(rank: Rank, readings: Sequence[Reading]) -> dict[str, Any]:
    world = rank.world
    own = [reading for reading in readings if world in reading.did]
    doing = [reading.did[world]["doing"] for reading in own]
    caused = sum(world in reading.causes for reading in own)
    memory = None
    with suppress(psutil.Error):
        if rank.host == os.uname().nodename:
            memory = psutil.Process(rank.pid).memory_info().rss
    return {
        "rank": world,
        "host": rank.host,
        "pid": rank.pid,
        "memory_bytes": memory,
        **own[-1].did[world],
        "steps_per_second": _rate(own, rank, "updates"),
        "examples_per_second": _rate(own, rank, "examples"),
        "waiting": doing.count(WAITING) / len(own),
        "wire": doing.count(WIRE) / len(own),
        "waited_for": caused / len(own),
    }


def _rate(readings: Sequence[Reading], rank: Rank, of: str) -> float | None:
    """Return the rate per second of a number that a rank counts; None if the number is 0."""
    first = readings[0]
    last = readings[-1]
    before = getattr(first.graph.ranks[rank.world], of)
    number = getattr(last.graph.ranks[rank.world], of) - before
    if not number or last.at == first.at:
        return None
    return float(number / (last.at - first.at))
