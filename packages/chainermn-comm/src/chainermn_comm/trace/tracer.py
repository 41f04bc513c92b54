"""Observes the calls of traced communicators."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..observers import NOBODY, CallObserver
from . import file
from .file import TraceFile, micros, now

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
    mine.add_metadata(
        "chainermn communicator",
        communicator=made.name,
        rank=comm.rank,
        ranks=members,
        # The file of a process that was in another communicator before is of that
        # one's run.
        run=run,
    )
    made.compare_clocks()
    return made


class CallTracer(CallObserver):
    """Observes a communicator's calls for the trace."""

    def __init__(self, comm: MPI.Intracomm, into: TraceFile, name: str) -> None:
        self._comm = comm
        self._file = into
        self.name = name
        # Of the call that is under way, if one is: it has begun then.
        self._begun: float | None = None
        self._operation = ""
        self._args: dict[str, Any] = {}

    def collective(
        self, operation: str, number: int, root: int = NOBODY, nbytes: int = 0
    ) -> None:
        if self._begun is not None:  # a further step of the same call
            return
        self._operation = operation
        self._args = {"communicator": self.name, "bytes": nbytes, "sequence": number}
        if root != NOBODY:
            self._args["root"] = root
        self._begun = now()

    def message(
        self, operation: str, peer: int, tag: int, nbytes: int = 0, what: str = ""
    ) -> None:
        self._operation = operation
        self._args = {
            "communicator": self.name,
            "bytes": nbytes,
            "peer": peer,
            "tag": tag,
        }
        self._begun = now()

    def arrived(self, operation: str, sequence: int) -> None:
        if self._begun is not None and "waited" not in self._args:
            self._args["waited"] = micros(now() - self._begun)
        is_power_of_two = not sequence & (sequence - 1)
        is_due = sequence >= FIRST_COMPARISON and is_power_of_two
        if is_due or operation == "finalize":
            self.compare_clocks()

    def leave(self) -> None:
        if self._begun is None:
            return
        raised = sys.exc_info()[0]
        if raised is not None:
            self._args["error"] = raised.__name__
        category = "message" if "peer" in self._args else "collective"
        self._file.add_call(self._operation, category, self._begun, self._args)
        self._begun = None

    def compare_clocks(self) -> None:
        """Write how far this clock is from the communicator's rank 0's (collective)."""
        zero = self._file.zero
        found = _measure_clock(self._comm)
        self._file.add_metadata(
            "chainermn clock",
            communicator=self.name,
            at=micros(found.at - zero),
            ahead=micros(found.ahead + zero),
            round_trip=micros(found.round_trip),
        )


class ClockComparison(NamedTuple):
    """How far rank 0's clock is ahead of this rank's, in seconds."""

    at: float  # by this rank's clock
    ahead: float
    round_trip: float  # twice the largest possible error


def _measure_clock(comm: MPI.Intracomm) -> ClockComparison:
    """Compare this rank's clock with rank 0's (collective).

    Each rank enters a barrier before any rank leaves the barrier: that bounds how far
    the clocks are apart from both sides. The bounds cross if one clock is faster and a
    rank is stopped.
    """
    entered = np.empty(ROUNDS)
    left = np.empty(ROUNDS)
    for number in range(ROUNDS):
        entered[number] = now()
        comm.Barrier()
        left[number] = now()
    at = float(entered[0])
    theirs = np.array([entered, left])
    comm.Bcast(theirs)
    if comm.rank == 0:
        return ClockComparison(at, 0.0, 0.0)
    most = float((theirs[1] - entered).min())
    least = float((theirs[0] - left).max())
    return ClockComparison(at, (most + least) / 2, abs(most - least))
