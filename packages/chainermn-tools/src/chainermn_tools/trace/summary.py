"""Summarizes a run for JSON: by operation, by rank, and the longest waits.

The run's times are aligned, its calls matched, and ``collectives`` is as `match`
returns it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from chainermn_tools.formatting import format_count, format_duration
from chainermn_tools.trace.table import NONE, Collective, Run

# Raised when a key changes its name or its meaning.
SCHEMA = 1
LONGEST = 10  # the number of waits that are listed


def summarize(
    run: Run, collectives: Sequence[Collective], incomplete: int, error: float = 0.0
) -> dict[str, Any]:
    """Return what docs/trace.md describes; clocks may differ by ``error`` microseconds."""
    operations = by_operation(run)
    ranks = by_rank(run, collectives)
    warnings = list(run.warnings)
    raised = [row.operation for row in operations if row.raised]
    if raised:
        warnings.append(f"raised on a rank: {', '.join(raised)}")
    if incomplete:
        lacking = format_count(incomplete, "collective call")
        warnings.append(f"{lacking} lacking a rank, not counted above")
    longest = sorted(collectives, key=lambda call: -call.others_waited_seconds)
    return {
        "schema": SCHEMA,
        "run": run.name,
        "hosts": sorted({trace.host for trace in run.ranks.values()}),
        "calls": len(run.table),
        "seconds": run.length / 1e6,
        "clock_error_seconds": error / 1e6,
        "operations": [row._asdict() for row in operations],
        "ranks": [row._asdict() for row in ranks],
        "longest_waits": [call._asdict() for call in longest[:LONGEST]],
        "warnings": warnings,
        "verdict": _verdict(run, ranks),
    }


class OperationRow(NamedTuple):
    """An operation, with the calls of all ranks together."""

    operation: str
    calls: int
    total_seconds: float
    median_seconds: float
    longest_seconds: float
    waiting_seconds: float  # for other ranks; part of the total
    bytes: int | None  # None if nothing is known
    gb_per_second: float | None  # without waiting; None for objects
    raised: int  # calls that ended by an exception


def by_operation(run: Run) -> list[OperationRow]:
    """Return the operations, the one with the longest total first."""
    found = []
    for number in np.unique(run.table["operation"]).tolist():
        calls = run.table[run.table["operation"] == number]
        times = calls["end"] - calls["start"]
        total = _seconds(times)
        waited = _seconds(calls["waited"])
        moving = total - waited
        # The sum of the bytes of millions of calls may exceed 64 bits.
        nbytes = sum(calls["nbytes"].tolist()) or None
        rate = None
        operation = run.names[number]
        # An object has few bytes, and the time includes pickling.
        if nbytes and moving > 0 and not operation.endswith("_obj"):
            rate = nbytes / moving / 1e9
        has_raised = calls["error"] != NONE
        row = OperationRow(
            operation=operation,
            calls=len(calls),
            total_seconds=total,
            median_seconds=float(np.median(times)) / 1e6,
            longest_seconds=float(times.max()) / 1e6,
            waiting_seconds=waited,
            bytes=nbytes,
            gb_per_second=rate,
            raised=int(has_raised.sum()),
        )
        found.append(row)
    return sorted(found, key=lambda row: -row.total_seconds)


class RankRow(NamedTuple):
    """A rank, with all its calls together."""

    rank: int
    host: str
    calls: int
    in_calls_seconds: float
    waiting_seconds: float  # for other ranks; part of the time in calls
    others_waited_seconds: float  # how long others waited for this rank, in total
    came_last: int  # to collective calls


def by_rank(run: Run, collectives: Sequence[Collective]) -> list[RankRow]:
    """Return the ranks; the rank that others waited for longest comes first."""
    came_last = Counter(call.rank for call in collectives)
    found = []
    for rank, trace in run.ranks.items():
        calls = run.calls_of(rank)
        is_late = run.table["late"] == rank
        row = RankRow(
            rank=rank,
            host=trace.host,
            calls=len(calls),
            in_calls_seconds=_seconds(calls["end"] - calls["start"]),
            waiting_seconds=_seconds(calls["waited"]),
            others_waited_seconds=_seconds(run.table["waited"][is_late]),
            came_last=came_last[rank],
        )
        found.append(row)
    return sorted(found, key=lambda row: -row.others_waited_seconds)


def _seconds(micros: np.ndarray) -> float:
    return float(micros.sum()) / 1e6


def _verdict(run: Run, ranks: Sequence[RankRow]) -> str:
    total = sum(row.others_waited_seconds for row in ranks)
    if not total and run.missing:
        return (
            "Whether a rank was waited for can't be told: files of ranks are missing."
        )
    if not total:
        return "No rank was waited for in the calls that ended."
    worst = ranks[0]
    waited = format_duration(worst.others_waited_seconds)
    return (
        f"Others wait most for rank {worst.rank} on {worst.host}: "
        f"{waited} of {format_duration(total)} of all waiting"
    )
