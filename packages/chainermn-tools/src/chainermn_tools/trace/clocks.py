"""Aligns all ranks' calls to the clock of one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chainermn_tools.trace.table import RankTrace, Run

# Two comparisons show drift if their error is less than this share of the time between
# them. Clocks of computers drift less, and a slope that is all error would be worse
# than no slope.
DRIFT = 1e-4


@dataclass(frozen=True)
class ClockOffset:
    """The conversion of times from one rank's clock to another's, in microseconds."""

    rank: int
    to: int  # the other rank
    at: np.ndarray  # times of the rank's clock, in ascending order
    add: np.ndarray  # what to add at these times
    error: float

    def apply(self, times: np.ndarray) -> np.ndarray:
        """Return times of the other rank's clock: interpolated, and extrapolated by the drift."""
        first = self.at[0]
        last = self.at[-1]
        moved: np.ndarray = times + np.interp(times, self.at, self.add)
        if self.error < DRIFT * (last - first):
            slope = (self.add[-1] - self.add[0]) / (last - first)
            beyond = times - np.clip(times, first, last)
            moved += slope * beyond
        return moved

    def reversed(self) -> ClockOffset:
        """Return the offset from the other rank to this one."""
        at = self.at + self.add
        return ClockOffset(self.to, self.rank, at, -self.add, self.error)


def align(run: Run) -> float:
    """Align all calls' times to the clock of the first present rank, which starts at zero.

    Return the microseconds by which ranks' times may be wrong. Ranks whose clocks
    nobody compared go by the time of day, and the run's warnings name them.
    """
    first = next(iter(run.ranks))
    ways = _ways(_offsets(run), first)
    for rank, trace in run.ranks.items():
        if rank not in ways:
            behind = (trace.began - run.ranks[first].began) * 1e6
            ways[rank] = [_constant(rank, first, behind)]
            run.warnings.append(
                f"rank {rank}: its clock is only known by the time of day"
            )
        mine = run.table["rank"] == rank
        for column in ("start", "end"):
            times = run.table[column][mine]
            for offset in ways[rank]:
                times = offset.apply(times)
            run.table[column][mine] = times
    start = run.table["start"].min(initial=np.inf)
    run.table["start"] -= start
    run.table["end"] -= start
    errors = [sum(offset.error for offset in way) for way in ways.values()]
    return max(errors)


def _ways(offsets: list[ClockOffset], first: int) -> dict[int, list[ClockOffset]]:
    """Return the offsets that lead from ranks to the first one, one after another."""
    ways: dict[int, list[ClockOffset]] = {first: []}
    for _ in offsets:  # a path may lead over all ranks
        for offset in offsets:
            if offset.to in ways and offset.rank not in ways:
                ways[offset.rank] = [offset, *ways[offset.to]]
    return ways


def _constant(rank: int, to: int, add: float) -> ClockOffset:
    return ClockOffset(rank, to, np.zeros(1), np.array([add]), 0.0)


def _offsets(run: Run) -> list[ClockOffset]:
    """Return the offsets that are known, in both directions, the most exact first."""
    found: list[ClockOffset] = []
    firsts: dict[str, RankTrace] = {}
    for trace in run.ranks.values():
        first = firsts.setdefault(trace.clock, trace)
        if first is not trace:  # these ranks share a clock
            found.append(_constant(trace.rank, first.rank, trace.zero - first.zero))
        for communicator, comparisons in trace.clocks.items():
            root = (trace.members.get(communicator) or [trace.rank])[0]
            if root in run.ranks and root != trace.rank:
                at, ahead, round_trip = np.array(sorted(comparisons)).T
                add = ahead - run.ranks[root].zero
                error = float(round_trip.max()) / 2
                found.append(ClockOffset(trace.rank, root, at, add, error))
    found += [offset.reversed() for offset in found]
    return sorted(found, key=lambda offset: offset.error)
