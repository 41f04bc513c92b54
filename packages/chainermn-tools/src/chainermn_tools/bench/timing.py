"""Checks and times trials in turn, on all ranks together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chainermn_tools.bench.operations import Trial

if TYPE_CHECKING:  # importing it starts MPI
    from mpi4py import MPI

# Calls whose time counts as one: as many as take so long, since a clock and a barrier cost some.
BATCH_SECONDS = 2e-3
MOST_CALLS, MOST_ROUNDS = 100, 40
# A communicator may try several ways before it settles for one; large sizes have less time.
WARM_UP_CALLS, WARM_UP_SECONDS = 10, 0.3
# A rank that waits in a barrier would keep its core busy.
NAP_SECONDS = 2e-4


@dataclass
class Times:
    """What was found of one trial.

    Attributes:
        right: whether the results before and after were.
        problem: what a call raised, and on which rank; None for nothing.
        seconds: of a call on the slowest rank, for each round.
        calls: that were timed, in all.
    """

    right: bool = True
    problem: str | None = None
    seconds: list[float] = field(default_factory=list)
    calls: int = 0

    @property
    def median(self) -> float:
        """Seconds of a call."""
        return statistics.median(self.seconds)


def is_right(world: MPI.Intracomm, trial: Trial) -> tuple[bool, str | None]:
    """Make one call with fresh values and look at the result (collective).

    Returns:
        Whether it was right on all ranks, and what it raised, if anything; the same everywhere.
    """
    problem = None
    right = False
    try:
        trial.prepare()
        world.Barrier()
        right = trial.is_right(trial.call())
    except Exception as error:  # all ranks of a collective raise; the caller leaves the trial out
        problem = f"{type(error).__name__}: {error}"
    said = world.allgather((right, problem))
    problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(said) if text]
    return all(one for one, _ in said), problems[0] if problems else None


def time_all(
    world: MPI.Intracomm, trials: Sequence[Trial], seconds: float
) -> tuple[list[Times], float]:
    """Check and time trials in turn, round after round (collective).

    Others' work on the machine then slows all of them alike. There is at least one round, and more
    until the time is over.

    Args:
        world: all ranks, also those that have no part in a trial.
        trials: the same on all ranks.
        seconds: for all trials together.

    Returns:
        For each trial what was found, the same on all ranks; no times where it was wrong or raised.
        And how long all of it took at least: the checks, a call, and a round.
    """
    start = time.perf_counter()
    found = [Times(*is_right(world, trial)) for trial in trials]
    checks = time.perf_counter() - start  # and the same follow at the end
    live = [n for n, times in enumerate(found) if times.right]
    firsts = {n: _warm_up(world, trials[n]) for n in live}
    calls = {
        n: min(MOST_CALLS, max(1, round(BATCH_SECONDS / first))) for n, first in firsts.items()
    }
    rounds, a_round = 0, 0.0
    while rounds < MOST_ROUNDS and live:
        begun = time.perf_counter()
        for n in live:
            found[n].seconds.append(_time(world, trials[n], calls[n]))
        now = time.perf_counter()
        rounds, a_round = rounds + 1, now - begun
        if world.bcast(now - start + checks + a_round > seconds):
            break
    for n in live:
        found[n].calls = rounds * calls[n]
        found[n].right, found[n].problem = is_right(world, trials[n])
    return found, world.bcast(2 * checks + sum(firsts.values()) + a_round)


def _warm_up(world: MPI.Intracomm, trial: Trial) -> float:
    """Call it until it is as fast as it will be; seconds of the fastest call."""
    took = [_time(world, trial, 1)]
    while len(took) < WARM_UP_CALLS and sum(took) < WARM_UP_SECONDS:
        took.append(_time(world, trial, 1))
    return min(took)


def _time(world: MPI.Intracomm, trial: Trial, calls: int) -> float:
    """Seconds that each of so many calls took on the slowest rank."""
    world.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        trial.call()
    took = time.perf_counter() - start
    done = world.Ibarrier()
    while not done.Test():
        time.sleep(NAP_SECONDS)
    slowest: float = max(world.allgather(took))
    return slowest / calls
