"""Times cases in turn, in step on all ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chainermn_tools.bench.timing import idle_barrier

if TYPE_CHECKING:  # importing it starts MPI
    from mpi4py import MPI


@dataclass(frozen=True)
class Timed:
    """What is timed beside others."""

    call: Callable[[], object]
    prepare: Callable[[], object] = lambda: None  # before each call, not timed
    rank_0_only: bool = False  # only rank 0 calls it, while the other ranks sleep


def time_in_turn(
    world: MPI.Intracomm | None,  # None for this rank by itself
    cases: Sequence[Timed],  # the same on all ranks
    rounds: int,  # how often each case has its turn
    *,
    warm_up: int = 0,  # rounds before, that don't count
    # Times that a case is timed in its turn; after the first, its code and what it
    # works on lie in the caches, whichever case was timed before.
    in_a_row: int = 1,
    calls: int = 1,  # whose mean counts as one time
    # Whether nothing else may have this core meanwhile; needs root.
    realtime: bool = False,
) -> np.ndarray:
    """Time cases in turn, in another order each round (collective).

    On a machine that others share, a figure is to be compared with its neighbours of a
    round. Return seconds of a call on the slowest rank; float64, shape (rounds, cases,
    in_a_row).
    """
    seconds = np.zeros((warm_up + rounds, len(cases), in_a_row))
    gc.collect()
    gc.disable()
    try:
        for turn, place, again in np.ndindex(seconds.shape):
            index = (place + turn) % len(cases)
            case = cases[index]
            case.prepare()
            mine = not case.rank_0_only or world is None or world.rank == 0
            with realtime_priority() if realtime else contextlib.nullcontext():
                took = time_call(
                    world, case.call if mine else None, calls, sleep=case.rank_0_only
                )
            seconds[turn, index, again] = took
    finally:
        gc.enable()
    if world is not None:
        seconds = np.max(world.allgather(seconds), axis=0)
    return seconds[warm_up:]


def time_call(
    # The ranks that begin together; None for this rank by itself.
    world: MPI.Intracomm | None,
    call: Callable[[], object] | None,  # None on ranks that have nothing to do
    calls: int = 1,
    *,
    sleep: bool = False,  # until all ranks are done
) -> float:
    """Return the seconds that each of ``calls`` calls in a row took on this rank."""
    if world is not None:
        world.Barrier()
    took = 0.0
    if call is not None:
        start = time.perf_counter()
        for _ in range(calls):
            _kept = call()  # what it returned last is freed after the time was taken
        took = time.perf_counter() - start
    if sleep and world is not None:
        idle_barrier(world)
    return took / calls


@contextlib.contextmanager
def realtime_priority() -> Iterator[None]:
    """Let nothing else have this rank's core; only for milliseconds, since others wait for it."""
    _schedule(os.SCHED_RR, 1)
    try:
        yield
    finally:
        _schedule(os.SCHED_OTHER, 0)


def _schedule(policy: int, level: int) -> None:
    # Every thread by itself: gloo's does the work while the main one waits.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread), policy, os.sched_param(level))
