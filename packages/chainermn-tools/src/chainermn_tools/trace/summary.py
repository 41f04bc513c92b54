"""Sums up a run as JSON can hold it: by operation, by rank, and which calls were late.

The run's times are aligned, its calls matched, and ``collectives`` is as `match`
returns it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from chainermn_tools.formatting import format_count, format_duration
from chainermn_tools.trace.table import NONE, Run

# Raised when a key changes its name or its meaning.
SCHEMA = 1
LONGEST = 10  # waits that are listed


def summarize(
    run: Run, collectives: np.ndarray, incomplete: int, error: float = 0.0
) -> dict[str, Any]:
    """Return what docs/trace.md describes; clocks may differ by ``error`` microseconds."""
    operations, ranks = by_operation(run), by_rank(run, collectives)
    warnings = [
        f"{row['operation']} raised in {format_count(row['raised'], 'call')}"
        for row in operations
        if row["raised"]
    ]
    if incomplete:
        lacking = format_count(incomplete, "collective call")
        warnings.append(f"{lacking} without all ranks, not counted above")
    return {
        "schema": SCHEMA,
        "run": run.name,
        "hosts": sorted({trace.host for trace in run.ranks.values()}),
        "calls": len(run.table),
        "seconds": float(run.table["end"].max(initial=0.0)) / 1e6,
        "clock_error_seconds": error / 1e6,
        "operations": operations,
        "ranks": ranks,
        "late_ranks": late_ranks(run, collectives),
        "longest_waits": _longest_waits(run, collectives),
        "warnings": [*run.warnings, *warnings],
        "verdict": _verdict(ranks),
    }


def by_operation(run: Run) -> list[dict[str, Any]]:
    """Return the operations, calls of all ranks together, the one with the longest total first."""
    found = []
    for number in np.unique(run.table["operation"]).tolist():
        calls = run.table[run.table["operation"] == number]
        times = (calls["end"] - calls["start"]) / 1e6
        total, waited = float(times.sum()), float(calls["waited"].sum()) / 1e6
        # The sum of millions of calls' bytes may be beyond an integer of 64 bits.
        nbytes, moving = sum(calls["nbytes"].tolist()), total - waited
        summary = {
            "operation": run.names[number],
            "calls": len(calls),
            "total_seconds": total,
            "median_seconds": float(np.median(times)),
            "longest_seconds": float(times.max()),
            "waiting_seconds": waited,  # for other ranks; part of the total
            "bytes": nbytes or None,
            # Of the time in which they didn't wait.
            "gb_per_second": nbytes / moving / 1e9 if nbytes and moving > 0 else None,
            "raised": int((calls["error"] != NONE).sum()),
        }
        found.append(summary)
    return sorted(found, key=lambda one: -one["total_seconds"])


def by_rank(run: Run, collectives: np.ndarray) -> list[dict[str, Any]]:
    """Return the ranks, the one that others waited for longest first."""
    found = []
    for rank, trace in run.ranks.items():
        calls, kept = trace.rows, run.table["waited"][run.table["late"] == rank]
        summary = {
            "rank": rank,
            "host": trace.host,
            "calls": len(calls),
            "in_calls_seconds": float((calls["end"] - calls["start"]).sum()) / 1e6,
            "waiting_seconds": float(calls["waited"].sum()) / 1e6,  # part of those
            "others_waited_seconds": float(kept.sum()) / 1e6,
            # To collective calls.
            "came_last": int((collectives["last"] == rank).sum()),
        }
        found.append(summary)
    return sorted(found, key=lambda one: -float(one["others_waited_seconds"]))


def late_ranks(run: Run, collectives: np.ndarray) -> list[dict[str, Any]]:
    """Return which rank is late by kind of call, the kind that was waited in longest first."""
    found = []
    kinds = collectives[["operation", "communicator"]]
    for kind in np.unique(kinds):
        own = collectives[kinds == kind]
        ranks, which = np.unique(own["last"], return_inverse=True)
        waited = np.bincount(which, own["waited"]) / 1e6
        worst = int(np.argmax(waited))
        operation, communicator = (run.names[number] for number in kind.tolist())
        times = int((which == worst).sum())
        summary = {
            "operation": operation,
            "communicator": communicator,
            "calls": len(own),  # each of several ranks
            "rank": int(ranks[worst]),  # for which the others waited longest, in sum
            "came_last": times,
            "share": times / len(own),
            "others_waited_seconds": float(waited[worst]),
            "in_all_seconds": float(waited.sum()),  # that ranks waited for any
        }
        found.append(summary)
    return sorted(found, key=lambda one: -one["in_all_seconds"])


def _longest_waits(run: Run, collectives: np.ndarray) -> list[dict[str, Any]]:
    longest = np.argsort(-collectives["waited"], kind="stable")[:LONGEST]
    return [
        {
            "at_seconds": float(call["start"]) / 1e6,
            "operation": run.names[call["operation"]],
            "communicator": run.names[call["communicator"]],
            "number": int(call["sequence"]),
            "rank": int(call["last"]),  # that came last
            "others_waited_seconds": float(call["waited"]) / 1e6,
        }
        for call in collectives[longest]
    ]


def _verdict(ranks: list[dict[str, Any]]) -> str:
    total = sum(row["others_waited_seconds"] for row in ranks)
    worst = ranks[0]
    if not total:
        return "No rank was waited for."
    return (
        f"Others wait most for rank {worst['rank']} on {worst['host']}: "
        f"{format_duration(worst['others_waited_seconds'])} of {format_duration(total)} of all "
        "waiting"
    )
