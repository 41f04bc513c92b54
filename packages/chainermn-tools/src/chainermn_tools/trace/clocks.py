"""Aligns all ranks' calls to the clock of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from chainermn_tools.trace.table import RankTrace, Run

# Two comparisons show drift if their error is less than this share of the time between
# them. Clocks of computers drift less, and to go on with a slope that is all error
# would be worse than none.
DRIFT = 1e-4


@dataclass(frozen=True)
class ClockOffset:
    """What turns times of one rank's clock into another's; microseconds."""

    to: int  # the other rank
    at: np.ndarray  # times of the rank's clock, growing
    add: np.ndarray  # what was to be added then
    error: float

    def apply(self, times: np.ndarray) -> np.ndarray:
        """Return times of the other rank's clock, interpolated; beyond comparisons with drift."""
        added = np.interp(times, self.at, self.add)
        span = float(self.at[-1] - self.at[0])
        if span > 0 and self.error / span < DRIFT:
            slope = float(self.add[-1] - self.add[0]) / span
            added += slope * (times - np.clip(times, self.at[0], self.at[-1]))
        moved: np.ndarray = times + added
        return moved

    def reversed(self, rank: int) -> ClockOffset:
        """Return the offset from the other rank to this one."""
        return ClockOffset(rank, self.at + self.add, -self.add, self.error)


def align(run: Run) -> float:
    """Align all calls' times to the clock of the first rank that is there, which starts at zero.

    Return the microseconds by which ranks' times may be wrong. Ranks whose clocks
    nobody compared go by the time of day, and the run's warnings name them.
    """
    offsets = _offsets(run)
    first = next(iter(run.ranks))
    ways: dict[int, tuple[list[Callable[[np.ndarray], np.ndarray]], float]] = {
        first: ([], 0.0)
    }
    todo = [first]
    for known in todo:  # grows meanwhile
        for rank, offset in offsets:
            if offset.to == known and rank not in ways:
                steps, error = ways[known]
                ways[rank] = [offset.apply, *steps], error + offset.error
                todo.append(rank)
    for rank, trace in run.ranks.items():
        if rank not in ways:
            behind = (trace.began - run.ranks[first].began) * 1e6
            ways[rank] = [partial(np.add, behind)], 0.0
            run.warnings.append(
                f"rank {rank}: its clock is only known by the time of day"
            )
        for step in ways[rank][0]:
            for column in ("start", "end"):
                trace.rows[column] = step(trace.rows[column])
    start = run.table["start"].min(initial=np.inf)
    for column in ("start", "end"):
        run.table[column] -= start
    return max(error for _, error in ways.values())


def _offsets(run: Run) -> list[tuple[int, ClockOffset]]:
    """Return offsets with the rank that each is of, in both directions, the most exact first."""
    found: list[tuple[int, ClockOffset]] = []
    firsts: dict[str, RankTrace] = {}
    for trace in run.ranks.values():
        first = firsts.setdefault(trace.clock, trace)
        if first is not trace:  # they share a clock
            add = np.array([trace.zero - first.zero])
            found.append((trace.rank, ClockOffset(first.rank, np.zeros(1), add, 0.0)))
        for communicator, comparisons in trace.clocks.items():
            members = trace.members.get(communicator)
            reference = run.ranks.get(members[0]) if members else None
            if reference is None or reference is trace:
                continue
            rows = sorted(
                (at, ahead - reference.zero, trip) for at, ahead, trip in comparisons
            )
            at, add, trips = (np.array(column) for column in zip(*rows, strict=True))
            error = float(trips.max()) / 2
            found.append((trace.rank, ClockOffset(reference.rank, at, add, error)))
    found += [(offset.to, offset.reversed(rank)) for rank, offset in found]
    return sorted(found, key=lambda one: one[1].error)
