"""Times calls in turn, in step on all ranks; checks invocations and times them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chainermn_tools.bench.operations import Invocation

if TYPE_CHECKING:  # importing it starts MPI
    from mpi4py import MPI

# Calls whose time counts as one: as many as take this time, since a clock and a barrier
# cost some.
BATCH_SECONDS = 2e-3
MAX_CALLS, MAX_ROUNDS = 100, 40
# A communicator may try several ways before it settles for one; large sizes have less
# time.
WARM_UP_CALLS, WARM_UP_SECONDS = 10, 0.3
NAP_SECONDS = 2e-4


@dataclass
class Times:
    """The result of one invocation."""

    correct: bool = True  # whether the results before and after were
    problem: str | None = None  # what a call raised, and on which rank
    # Of a call on the slowest rank, by round.
    seconds: list[float] = field(default_factory=list)
    calls: int = 0  # that were timed, in all


def is_correct(world: MPI.Intracomm, invocation: Invocation) -> tuple[bool, str | None]:
    """Make one call with fresh values and look at the result (collective).

    Return whether it was right on all ranks, and what it raised, if anything; the same
    everywhere.
    """
    problem = None
    correct = False
    try:
        invocation.prepare()
        world.Barrier()
        correct = invocation.is_correct(invocation.call())
    except Exception as error:  # all ranks raise; the caller leaves the invocation out
        problem = f"{type(error).__name__}: {error}"
    results = world.allgather((correct, problem))
    problems = [
        f"rank {rank}: {text}" for rank, (_, text) in enumerate(results) if text
    ]
    return all(one for one, _ in results), problems[0] if problems else None


def time_all(
    world: MPI.Intracomm,
    invocations: Sequence[Invocation],  # the same on all ranks
    seconds: float,  # for all invocations
) -> tuple[list[Times], float]:
    """Check and time invocations in turn, round after round (collective).

    Others' work on the machine then slows all of them alike. There is at least one
    round, and more until the time is over.

    Return for each invocation what was found, the same on all ranks; no times where it
    was wrong or raised. And how long all of it took at least: the checks, a call, and a
    round.
    """
    start = time.perf_counter()
    found = [Times(*is_correct(world, invocation)) for invocation in invocations]
    checks = time.perf_counter() - start  # and the same follow at the end
    live = [n for n, times in enumerate(found) if times.correct]
    firsts = {n: _warm_up(world, invocations[n]) for n in live}
    calls = {
        n: min(MAX_CALLS, max(1, round(BATCH_SECONDS / first)))
        for n, first in firsts.items()
    }
    rounds, a_round = 0, 0.0
    while rounds < MAX_ROUNDS and live:
        begun = time.perf_counter()
        for n in live:
            found[n].seconds.append(_time(world, invocations[n], calls[n]))
        now = time.perf_counter()
        rounds, a_round = rounds + 1, now - begun
        if world.bcast(now - start + checks + a_round > seconds):
            break
    for n in live:
        found[n].calls = rounds * calls[n]
        found[n].correct, found[n].problem = is_correct(world, invocations[n])
    return found, world.bcast(2 * checks + sum(firsts.values()) + a_round)


def _warm_up(world: MPI.Intracomm, invocation: Invocation) -> float:
    """Call it until it is as fast as it will be; return the seconds of the fastest call."""
    took = [_time(world, invocation, 1)]
    while len(took) < WARM_UP_CALLS and sum(took) < WARM_UP_SECONDS:
        took.append(_time(world, invocation, 1))
    return min(took)


def _time(world: MPI.Intracomm, invocation: Invocation, calls: int) -> float:
    """Return the seconds that each of ``calls`` calls in a row took on the slowest rank."""
    world.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        # What it returned last is freed after the time was taken.
        _kept = invocation.call()
    took = time.perf_counter() - start
    idle_barrier(world)
    return float(max(world.allgather(took / calls)))


def idle_barrier(world: MPI.Intracomm) -> None:
    """Wait for all ranks, and keep no core busy meanwhile (collective)."""
    done = world.Ibarrier()
    while not done.Test():
        time.sleep(NAP_SECONDS)
