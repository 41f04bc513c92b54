"""Sums up a run as JSON can hold it: by operation, by rank, and the longest waits.

The run's times are aligned, its calls matched, and ``collectives`` is as `match`
returns it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from chainermn_tools.formatting import format_count, format_duration
from chainermn_tools.trace.table import NONE, Collective, Run

# Raised when a key changes its name or its meaning.
SCHEMA = 1
LONGEST = 10  # waits that are listed


def summarize(
    run: Run, collectives: Sequence[Collective], incomplete: int, error: float = 0.0
) -> dict[str, Any]:
    """Return what docs/trace.md describes; clocks may differ by ``error`` microseconds."""
    operations = by_operation(run)
    ranks = by_rank(run, collectives)
    warnings = list(run.warnings)
    raised = [row["operation"] for row in operations if row["raised"]]
    if raised:
        warnings.append(f"raised on a rank: {', '.join(raised)}")
    if incomplete:
        lacking = format_count(incomplete, "collective call")
        warnings.append(f"{lacking} without all ranks, not counted above")
    longest = sorted(collectives, key=lambda call: -call.others_waited_seconds)
    return {
        "schema": SCHEMA,
        "run": run.name,
        "hosts": sorted({trace.host for trace in run.ranks.values()}),
        "calls": len(run.table),
        "seconds": run.length / 1e6,
        "clock_error_seconds": error / 1e6,
        "operations": operations,
        "ranks": ranks,
        "longest_waits": [call._asdict() for call in longest[:LONGEST]],
        "warnings": warnings,
        "verdict": _verdict(ranks),
    }


def by_operation(run: Run) -> list[dict[str, Any]]:
    """Return the operations, calls of all ranks together, the one with the longest total first."""
    found = []
    for number in np.unique(run.table["operation"]).tolist():
        calls = run.table[run.table["operation"] == number]
        times = (calls["end"] - calls["start"]) / 1e6
        total = float(times.sum())
        waited = _seconds(calls["waited"])
        moving = total - waited
        # The sum of millions of calls' bytes may be beyond an integer of 64 bits.
        nbytes = sum(calls["nbytes"].tolist())
        rate = None
        if nbytes and moving > 0:
            rate = nbytes / moving / 1e9
        summary = {
            "operation": run.names[number],
            "calls": len(calls),
            "total_seconds": total,
            "median_seconds": float(np.median(times)),
            "longest_seconds": float(times.max()),
            "waiting_seconds": waited,  # for other ranks; part of the total
            "bytes": nbytes or None,
            "gb_per_second": rate,  # of the time in which they didn't wait
            "raised": int((calls["error"] != NONE).sum()),
        }
        found.append(summary)
    return sorted(found, key=lambda row: -row["total_seconds"])


def by_rank(run: Run, collectives: Sequence[Collective]) -> list[dict[str, Any]]:
    """Return the ranks, the one that others waited for longest first."""
    came_last = Counter(call.rank for call in collectives)
    found = []
    for rank, trace in run.ranks.items():
        calls = run.calls_of(rank)
        kept = run.table["waited"][run.table["late"] == rank]
        summary = {
            "rank": rank,
            "host": trace.host,
            "calls": len(calls),
            "in_calls_seconds": _seconds(calls["end"] - calls["start"]),
            "waiting_seconds": _seconds(calls["waited"]),  # part of those
            "others_waited_seconds": _seconds(kept),
            "came_last": came_last[rank],  # to collective calls
        }
        found.append(summary)
    return sorted(found, key=lambda row: -row["others_waited_seconds"])


def _seconds(micros: np.ndarray) -> float:
    return float(micros.sum()) / 1e6


def _verdict(ranks: Sequence[dict[str, Any]]) -> str:
    total = sum(row["others_waited_seconds"] for row in ranks)
    worst = ranks[0]
    if not total:
        return "No rank was waited for."
    waited = format_duration(worst["others_waited_seconds"])
    return (
        f"Others wait most for rank {worst['rank']} on {worst['host']}: "
        f"{waited} of {format_duration(total)} of all waiting"
    )
