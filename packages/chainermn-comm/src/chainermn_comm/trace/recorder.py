"""Observes the calls of traced communicators."""

from __future__ import annotations

import sys
from threading import get_ident

import numpy as np
from mpi4py import MPI

from ..observers import NOBODY, CallObserver
from . import file
from .file import Kind, TraceFile, now

# Clocks drift: they are compared again at this collective call, at twice as many, and so on.
FIRST_COMPARISON = 64
# Round trips to rank 0; only the shortest counts.
ROUND_TRIPS = 10
# Communicators that this process made, to give each a name.
_num_traced = 0


def start(comm: MPI.Intracomm, folder: str) -> CallTracer:
    """Return an observer that writes a communicator's calls into this process's file (collective).

    All ranks have one, or none has.
    """
    global _num_traced
    world = MPI.COMM_WORLD
    _num_traced += 1
    first, number, run = comm.bcast((world.rank, _num_traced, file.run_name()))
    members = np.empty(comm.size, np.int32)
    comm.Allgather(np.array([world.rank], np.int32), members)
    mine = file.begin(folder, run, world.rank, world.size)
    made = CallTracer(comm, mine, f"{first}.{number}")
    # A process that was in another communicator before may have a file of that one's run.
    about = {"communicator": made.name, "rank": comm.rank, "ranks": members.tolist(), "run": run}
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
        self, operation: str, sequence: int, root: int = NOBODY, nbytes: int = 0
    ) -> None:
        """Note when the call begins."""
        if not self._start:  # else it is a further step of the same call
            self._sequence = sequence
            self._kind = (operation, self.name, True, nbytes, root, NOBODY)
            self._arrived = 0.0
            self._start = now()

    def message(
        self, operation: str, peer: int, tag: int, nbytes: int = 0, scope: str = ""
    ) -> None:
        """Note when the call begins."""
        self._kind = (operation, self.name, False, nbytes, peer, tag)
        self._start = now()

    def arrived(self, operation: str, sequence: int) -> None:
        """Note when all ranks had come; now and then, and at the end, compare clocks."""
        if not self._arrived:
            self._arrived = now()
        if (
            sequence >= FIRST_COMPARISON and not sequence & (sequence - 1)
        ) or operation == "finalize":
            self.compare_clocks()

    def leave(self) -> None:
        """Have the call written."""
        if self._start:
            times, self._start = (self._start, now(), self._arrived), 0.0
            raised = sys.exc_info()[0]
            error = None if raised is None else raised.__name__
            self._file.add_call((self._kind, self._sequence, *times, get_ident(), error))

    def compare_clocks(self) -> None:
        """Write how far this clock is from the communicator's rank 0's (collective)."""
        zero, (at, ahead, round_trip) = self._file.zero, _measure_clock(self._comm)
        times = {"at": at - zero, "ahead": ahead + zero, "round_trip": round_trip}
        micros = {name: round(seconds * 1e6, 3) for name, seconds in times.items()}
        self._file.add_metadata("chainermn clock", communicator=self.name, **micros)


def _measure_clock(comm: MPI.Intracomm) -> tuple[float, float, float]:
    """Return when clocks were compared (collective), how far rank 0's is ahead, the messages' time.

    All are seconds; half of the last is the error at most. In a binomial tree each rank asks its
    parent for rank 0's time, as that knows it by then, and the child with most descendants first.
    """
    # Collective operations have this tag, too, but all ranks are here between the same two.
    tag = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0)
    rank, size = comm.rank, comm.size
    theirs = np.zeros(2)  # rank 0's time, and the messages' time up to the rank that is asked
    found = [] if rank else [(now(), 0.0, 0.0)]
    for _ in range(ROUND_TRIPS if rank else 0):
        sent = now()
        comm.Send(theirs, rank & (rank - 1), tag)
        comm.Recv(theirs, rank & (rank - 1), tag)
        received = now()
        middle = (sent + received) / 2
        found.append((middle, float(theirs[0]) - middle, received - sent + float(theirs[1])))
    at, ahead, round_trip = min(found, key=lambda one: one[2])
    steps = [1 << bit for bit in reversed(range(size.bit_length()))]
    for child in [rank + step for step in steps if not rank % (2 * step) and rank + step < size]:
        for _ in range(ROUND_TRIPS):
            comm.Recv(theirs, child, tag)
            theirs[:] = now() + ahead, round_trip
            comm.Send(theirs, child, tag)
    return at, ahead, round_trip
