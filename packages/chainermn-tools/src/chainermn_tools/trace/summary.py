"""Sums up a run's calls: by operation, by rank, and who was late."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chainermn_tools.trace.matching import CollectiveCall, each_collective
from chainermn_tools.trace.table import NONE, Run


@dataclass(frozen=True)
class OperationSummary:
    """All calls of an operation, of all ranks; times in seconds.

    Attributes:
        operation: its name.
        count: of calls; a collective call of four ranks is four.
        total: of their times.
        median: likewise.
        longest: likewise.
        waited: in which they waited for other ranks; part of the total.
        nbytes: of their payloads.
        bandwidth: bytes a second of the time in which they didn't wait; None where no bytes are
            known.
        failed: how many raised.
    """

    operation: str
    count: int
    total: float
    median: float
    longest: float
    waited: float
    nbytes: int
    bandwidth: float | None
    failed: int


@dataclass(frozen=True)
class RankSummary:
    """One rank; times in seconds.

    Attributes:
        rank: in MPI.COMM_WORLD.
        host: where it ran.
        calls: how many.
        total: in calls.
        waited: for others; part of the total.
        kept: how long others waited for it, in sum.
        last: to how many collective calls it came last.
    """

    rank: int
    host: str
    calls: int
    total: float
    waited: float
    kept: float
    last: int


@dataclass(frozen=True)
class StragglerStats:
    """Who comes last to the collective calls of one kind.

    Attributes:
        operation: its name.
        communicator: its name.
        count: collective calls, each of several ranks.
        rank: for which the others waited longest, in sum.
        times: to how many of them it came last.
        kept: seconds that others waited for it.
        waited: seconds that ranks waited for any.
    """

    operation: str
    communicator: str
    count: int
    rank: int
    times: int
    kept: float
    waited: float


def by_operation(run: Run) -> list[OperationSummary]:
    """Return the operations, the one with the longest total first."""
    operations = run.table["operation"]
    found = [
        _summarize(run.names.names[number], run.table[operations == number])
        for number in np.unique(operations).tolist()
    ]
    return sorted(found, key=lambda one: -one.total)


def _summarize(name: str, calls: np.ndarray) -> OperationSummary:
    times = (calls["end"] - calls["start"]) / 1e6
    total, waited = float(times.sum()), float(calls["waited"].sum()) / 1e6
    # Of millions of calls the sum of bytes may be beyond an integer of 64 bits.
    nbytes, moving = sum(calls["nbytes"].tolist()), total - waited
    return OperationSummary(
        name,
        len(calls),
        total,
        float(np.median(times)),
        float(times.max()),
        waited,
        nbytes,
        nbytes / moving if nbytes and moving > 0 else None,
        int((calls["error"] != NONE).sum()),
    )


def by_rank(run: Run, collectives: np.ndarray) -> list[RankSummary]:
    """Return the ranks in their order.

    Args:
        run: with times aligned and calls matched.
        collectives: as `match` returns them.
    """
    found = []
    for rank, trace in run.ranks.items():
        rows = trace.rows
        late = run.table["late"] == rank
        found.append(
            RankSummary(
                rank,
                trace.host,
                len(rows),
                float((rows["end"] - rows["start"]).sum()) / 1e6,
                float(rows["waited"].sum()) / 1e6,
                float(run.table["waited"][late].sum()) / 1e6,
                int((collectives["last"] == rank).sum()),
            )
        )
    return found


def straggler_stats(run: Run, collectives: np.ndarray) -> list[StragglerStats]:
    """Return who is late by kind of call, the kind that was waited in longest first."""
    found = []
    kinds = collectives[["operation", "communicator"]]
    for kind in np.unique(kinds):
        own = collectives[kinds == kind]
        ranks, which = np.unique(own["last"], return_inverse=True)
        kept = np.bincount(which, own["waited"]) / 1e6
        worst = int(kept.argmax())
        operation, communicator = (run.names.names[number] for number in kind.tolist())
        times = int((which == worst).sum())
        found.append(
            StragglerStats(
                operation,
                communicator,
                len(own),
                int(ranks[worst]),
                times,
                float(kept[worst]),
                float(kept.sum()),
            )
        )
    return sorted(found, key=lambda one: -one.waited)


def longest_waits(run: Run, collectives: np.ndarray, number: int) -> list[CollectiveCall]:
    """Return the collective calls in which the others waited longest, the longest first."""
    order = np.argsort(-collectives["waited"], kind="stable")[:number]
    return list(each_collective(collectives[order], run.names))
