"""What a run's calls come to: by operation, by rank, and who was late."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from chainermn_tools.trace.reading import Call, Run
from chainermn_tools.trace.waiting import Meeting


@dataclass(frozen=True)
class OperationSummary:
    """All calls of an operation, of all ranks; times in seconds.

    Attributes:
        operation: its name.
        count: of calls; a collective call of four ranks is four.
        total, median, longest: of their times.
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
        kept: how long others waited for it, together.
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
class Lateness:
    """Who comes last to the collective calls of one kind.

    Attributes:
        operation: its name.
        communicator: its name.
        count: collective calls, each of several ranks.
        rank: for which the others waited longest, together.
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
    """The longest first."""
    groups: dict[str, list[Call]] = defaultdict(list)
    for call in run.calls:
        groups[call.operation].append(call)
    found = [_operation(name, calls) for name, calls in groups.items()]
    return sorted(found, key=lambda one: -one.total)


def _operation(name: str, calls: Sequence[Call]) -> OperationSummary:
    times = [call.seconds for call in calls]
    total, waited = sum(times), sum(call.waited for call in calls) / 1e6
    nbytes, moving = sum(call.nbytes for call in calls), total - waited
    return OperationSummary(
        name,
        len(calls),
        total,
        statistics.median(times),
        max(times),
        waited,
        nbytes,
        nbytes / moving if nbytes and moving > 0 else None,
        sum(call.error is not None for call in calls),
    )


def by_rank(run: Run, meetings: Sequence[Meeting]) -> list[RankSummary]:
    """In the order of ranks."""
    kept: Counter[int] = Counter()
    for call in run.calls:
        if call.late is not None:
            kept[call.late] += call.waited  # type: ignore[assignment]
    last = Counter(meeting.last.rank for meeting in meetings)
    return [
        RankSummary(
            rank,
            trace.host,
            len(trace.calls),
            sum(call.seconds for call in trace.calls),
            sum(call.waited for call in trace.calls) / 1e6,
            kept[rank] / 1e6,
            last[rank],
        )
        for rank, trace in run.ranks.items()
    ]


def by_lateness(meetings: Sequence[Meeting]) -> list[Lateness]:
    """The kind of call that was waited in longest first."""
    groups: dict[tuple[str, str], list[Meeting]] = defaultdict(list)
    for meeting in meetings:
        groups[meeting.last.operation, meeting.last.communicator].append(meeting)
    found = []
    for (operation, communicator), those in groups.items():
        kept: dict[int, float] = defaultdict(float)
        for meeting in those:
            kept[meeting.last.rank] += meeting.waited / 1e6
        rank = max(kept, key=lambda one: kept[one])
        times = sum(meeting.last.rank == rank for meeting in those)
        total = sum(kept.values())
        found.append(Lateness(operation, communicator, len(those), rank, times, kept[rank], total))
    return sorted(found, key=lambda one: -one.waited)


def longest_waits(meetings: Sequence[Meeting], number: int) -> list[Meeting]:
    """The collective calls in which the others waited longest, the longest first."""
    return sorted(meetings, key=lambda one: -one.waited)[:number]
