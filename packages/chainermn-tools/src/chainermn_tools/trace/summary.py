"""Sums up a run's calls: by operation, by rank, and which were late; times in seconds.

The run's times are aligned, its calls matched, and ``collectives`` is as `match` returns it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chainermn_tools.trace.table import NONE, Run


@dataclass(frozen=True)
class OperationSummary:
    """All calls of an operation, of all ranks."""

    operation: str
    count: int  # a collective call of four ranks is four
    total: float
    median: float
    longest: float
    waited: float  # for other ranks; part of the total
    nbytes: int
    bandwidth: float | None  # bytes a second of the time in which they didn't wait
    failed: int


@dataclass(frozen=True)
class RankSummary:
    """All calls of a rank."""

    rank: int
    host: str
    calls: int
    total: float
    waited: float  # for others; part of the total
    kept: float  # that others waited for it, in sum
    last: int  # to how many collective calls it came last


@dataclass(frozen=True)
class StragglerStats:
    """The rank that comes last to the collective calls of one kind."""

    operation: str
    communicator: str
    count: int  # collective calls, each of several ranks
    rank: int  # for which the others waited longest, in sum
    times: int  # to how many calls it came last
    kept: float  # that others waited for it
    waited: float  # that ranks waited for any


def by_operation(run: Run) -> list[OperationSummary]:
    """Return the operations, the one with the longest total first."""
    found = []
    for number in np.unique(run.table["operation"]).tolist():
        calls = run.table[run.table["operation"] == number]
        times = (calls["end"] - calls["start"]) / 1e6
        total, waited = float(times.sum()), float(calls["waited"].sum()) / 1e6
        # The sum of millions of calls' bytes may be beyond an integer of 64 bits.
        nbytes, moving = sum(calls["nbytes"].tolist()), total - waited
        summary = OperationSummary(
            operation=run.names[number],
            count=len(calls),
            total=total,
            median=float(np.median(times)),
            longest=float(times.max()),
            waited=waited,
            nbytes=nbytes,
            bandwidth=nbytes / moving if nbytes and moving > 0 else None,
            failed=int((calls["error"] != NONE).sum()),
        )
        found.append(summary)
    return sorted(found, key=lambda one: -one.total)


def by_rank(run: Run, collectives: np.ndarray) -> list[RankSummary]:
    """Return the ranks in their order."""
    return [
        RankSummary(
            rank=rank,
            host=trace.host,
            calls=len(trace.rows),
            total=float((trace.rows["end"] - trace.rows["start"]).sum()) / 1e6,
            waited=float(trace.rows["waited"].sum()) / 1e6,
            kept=float(run.table["waited"][run.table["late"] == rank].sum()) / 1e6,
            last=int((collectives["last"] == rank).sum()),
        )
        for rank, trace in run.ranks.items()
    ]


def straggler_stats(run: Run, collectives: np.ndarray) -> list[StragglerStats]:
    """Return which rank is late by kind of call, the kind that was waited in longest first."""
    found = []
    kinds = collectives[["operation", "communicator"]]
    for kind in np.unique(kinds):
        own = collectives[kinds == kind]
        ranks, which = np.unique(own["last"], return_inverse=True)
        kept = np.bincount(which, own["waited"]) / 1e6
        worst = int(np.argmax(kept))
        operation, communicator = (run.names[number] for number in kind.tolist())
        stats = StragglerStats(
            operation=operation,
            communicator=communicator,
            count=len(own),
            rank=int(ranks[worst]),
            times=int((which == worst).sum()),
            kept=float(kept[worst]),
            waited=float(kept.sum()),
        )
        found.append(stats)
    return sorted(found, key=lambda one: -one.waited)
