"""Observes the calls of traced communicators."""

from __future__ import annotations

import sys
from threading import get_ident

import numpy as np
from mpi4py import MPI

from ..observers import NOBODY, CallObserver
from . import file
from .file import Kind, TraceFile, now

# Clocks drift: they are compared again at this collective call, at twice as many, and
# so on.
FIRST_COMPARISON = 64
# Of each comparison; only the shortest count.
ROUNDS = 10
# Communicators that this process made, to give each a name.
_num_traced = 0


def start(comm: MPI.Intracomm, folder: str) -> CallTracer:
    """Return an observer that writes a communicator's calls into a file (collective)."""
    global _num_traced
    world = MPI.COMM_WORLD
    _num_traced += 1
    first, number, run = comm.bcast((world.rank, _num_traced, file.run_name()))
    members = comm.allgather(world.rank)
    mine = file.begin(folder, run, world.rank, world.size)
    made = CallTracer(comm, mine, f"{first}.{number}")
    # A process that was in another communicator before may have a file of that one's
    # run.
    about = {"communicator": made.name, "rank": comm.rank, "ranks": members, "run": run}
    mine.add_metadata("chainermn communicator", **about)
    made.compare_clocks()
    return made


class CallTracer(CallObserver):
    """Observes a communicator's calls for the trace."""

    def __init__(self, comm: MPI.Intracomm, into: TraceFile, name: str) -> None:
        self._comm, self._file, self.name = comm, into, name
        self._start = self._arrived = 0.0
        self._sequence = 0
        self._kind: Kind = ("", name, True, 0, NOBODY, NOBODY)

    def collective(
        self, operation: str, number: int, root: int = NOBODY, nbytes: int = 0
    ) -> None:
        if not self._start:  # else it is a further step of the same call
            self._sequence = number
            self._kind = (operation, self.name, True, nbytes, root, NOBODY)
            self._arrived = 0.0
            self._start = now()

    def message(
        self, operation: str, peer: int, tag: int, nbytes: int = 0, what: str = ""
    ) -> None:
        self._kind = (operation, self.name, False, nbytes, peer, tag)
        self._start = now()

    def arrived(self, operation: str, sequence: int) -> None:
        if not self._arrived:
            self._arrived = now()
        if (
            sequence >= FIRST_COMPARISON and not sequence & (sequence - 1)
        ) or operation == "finalize":
            self.compare_clocks()

    def leave(self) -> None:
        if self._start:
            times, self._start = (self._start, now(), self._arrived), 0.0
            raised = sys.exc_info()[0]
            error = None if raised is None else raised.__name__
            self._file.add_call(
                (self._kind, self._sequence, *times, get_ident(), error)
            )

    def compare_clocks(self) -> None:
        """Write how far this clock is from the communicator's rank 0's (collective)."""
        zero, (at, ahead, round_trip) = self._file.zero, _measure_clock(self._comm)
        times = {"at": at - zero, "ahead": ahead + zero, "round_trip": round_trip}
        micros = {name: round(seconds * 1e6, 3) for name, seconds in times.items()}
        self._file.add_metadata("chainermn clock", communicator=self.name, **micros)


def _measure_clock(comm: MPI.Intracomm) -> tuple[float, float, float]:
    """Return when clocks were compared (collective), how far rank 0's is ahead, twice the error.

    All are seconds. Each rank enters a barrier before any rank leaves it: that bounds
    how far the clocks are apart from both sides. The bounds cross if one clock is
    faster and a rank is stopped.
    """
    times = np.empty((2, ROUNDS))
    for number in range(ROUNDS):
        times[0, number] = now()
        comm.Barrier()
        times[1, number] = now()
    theirs = times.copy()
    comm.Bcast(theirs)
    most, least = (theirs[1] - times[0]).min(), (theirs[0] - times[1]).max()
    at = float(times[0, 0])
    return (
        (at, float(most + least) / 2, float(abs(most - least)))
        if comm.rank
        else (at, 0.0, 0.0)
    )
