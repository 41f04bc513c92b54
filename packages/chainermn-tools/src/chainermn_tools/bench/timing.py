"""Checks invocations, and times them in turn, at the same time on all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chainermn_tools.bench.operations import Invocation

if TYPE_CHECKING:  # importing it starts MPI
    from mpi4py import MPI

# A batch has as many calls as take this time, since a clock and a barrier cost time,
# too.
BATCH_SECONDS = 2e-3
MAX_CALLS = 100
MAX_ROUNDS = 40
# A communicator's first calls may be slower; large sizes have less time to warm up.
WARM_UP_CALLS = 10
WARM_UP_SECONDS = 0.3
NAP_SECONDS = 2e-4


@dataclass
class Times:
    """The result of one invocation."""

    correct: bool = True  # whether the results before and after the timing were right
    problem: str | None = None  # the error of a call, and its rank
    # The time of a call on the slowest rank, by round.
    seconds: list[float] = field(default_factory=list)


def is_correct(world: MPI.Intracomm, invocation: Invocation) -> tuple[bool, str | None]:
    """Make one call with fresh values, and check the result (collective).

    Return whether the result was right on all ranks, and the error that was raised, if
    any. All ranks return the same.
    """
    problem = None
    correct = False
    try:
        invocation.prepare()
        world.Barrier()
        correct = invocation.is_correct(invocation.call())
    except Exception as error:  # all ranks raise; the caller leaves the invocation out
        problem = f"rank {world.rank}: {type(error).__name__}: {error}"
    problems = [each for each in world.allgather(problem) if each is not None]
    if problems:
        return False, problems[0]
    return all(world.allgather(correct)), None


def time_all(
    world: MPI.Intracomm,
    invocations: Sequence[Invocation],  # the same on all ranks
    seconds: float,  # for all rounds; at least one is made
) -> list[Times]:
    """Check and time invocations in turn, round after round (collective).

    Other work on the machine then slows all of them alike.

    Return the findings about each invocation, the same on all ranks. An invocation that
    was wrong or raised an error has no times.
    """
    found = [Times(*is_correct(world, invocation)) for invocation in invocations]
    timed = []
    for invocation, times in zip(invocations, found, strict=True):
        if times.correct:
            timed.append((invocation, times, _calls_of_a_batch(world, invocation)))
    end = time.perf_counter() + seconds
    for _ in range(MAX_ROUNDS):
        for invocation, times, calls in timed:
            times.seconds.append(_time(world, invocation, calls))
        if world.bcast(time.perf_counter() > end):
            break
    for invocation, times, _ in timed:
        times.correct, times.problem = is_correct(world, invocation)
    return found


def _calls_of_a_batch(world: MPI.Intracomm, invocation: Invocation) -> int:
    """Call until calls are fast; return how many calls take `BATCH_SECONDS`."""
    took: list[float] = []
    while len(took) < WARM_UP_CALLS and sum(took) < WARM_UP_SECONDS:
        took.append(_time(world, invocation, 1))
    return min(MAX_CALLS, 1 + int(BATCH_SECONDS / min(took)))


def _time(world: MPI.Intracomm, invocation: Invocation, calls: int) -> float:
    """Return the seconds that each of ``calls`` calls in a row took on the slowest rank."""
    world.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        # The last result is freed after the time is taken.
        _kept = invocation.call()
    took = time.perf_counter() - start
    idle_barrier(world)
    return float(max(world.allgather(took / calls)))


def idle_barrier(world: MPI.Intracomm) -> None:
    """Wait for all ranks, and keep no core busy meanwhile (collective)."""
    done = world.Ibarrier()
    while not done.Test():
        time.sleep(NAP_SECONDS)
