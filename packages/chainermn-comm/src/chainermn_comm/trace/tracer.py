"""Observes the calls of traced communicators."""

from __future__ import annotations

from operator import sub
from typing import Any

from mpi4py import MPI

from ..observers import NOBODY, CallObserver
from . import file
from .file import TraceFile, micros, now

# Clocks drift, so they are compared again after this number of collective calls, after
# twice as many, and so on.
FIRST_COMPARISON = 64
# Rounds of each comparison, of which only the shortest count.
ROUNDS = 10
# The number of communicators that this process has traced, by which each gets a name.
_num_traced = 0


def start(comm: MPI.Intracomm, folder: str, other: CallObserver) -> CallTracer:
    """Return an observer that writes a communicator's calls into a file (collective).

    It reports each call to the ``other`` observer first.
    """
    global _num_traced
    world = MPI.COMM_WORLD
    _num_traced += 1
    first, number, run = comm.bcast((world.rank, _num_traced, file.run_name()))
    members = comm.allgather(world.rank)
    mine = file.begin(folder, run, world.rank, world.size)
    made = CallTracer(comm, mine, f"{first}.{number}", other)
    mine.add_metadata(
        "chainermn communicator",
        communicator=made.name,
        rank=comm.rank,
        ranks=members,
        # A process that was in another communicator before has a file of that
        # communicator's run.
        run=run,
    )
    made.compare_clocks()
    return made


class CallTracer(CallObserver):
    """Observes a communicator's calls for the trace."""

    def __init__(
        self, comm: MPI.Intracomm, into: TraceFile, name: str, other: CallObserver
    ) -> None:
        self._other = other
        self._comm = comm
        self._file = into
        self.name = name
        # The start of the current call, or None.
        self._begun: float | None = None
        self._operation = ""
        self._args: dict[str, Any] = {}
        self._next_comparison = FIRST_COMPARISON

    def collective(
        self, operation: str, number: int, root: int = NOBODY, nbytes: int = 0
    ) -> None:
        self._other.collective(operation, number, root, nbytes)
        if self._begun is not None:  # a further step of the same call
            return
        self._begin(operation, bytes=nbytes, sequence=number)
        if root != NOBODY:
            self._args["root"] = root

    def message(
        self, operation: str, peer: int, tag: int, nbytes: int = 0, what: str = ""
    ) -> None:
        self._other.message(operation, peer, tag, nbytes, what)
        self._begin(operation, bytes=nbytes, peer=peer, tag=tag)

    def _begin(self, operation: str, **args: Any) -> None:
        self._operation = operation
        self._args = {"communicator": self.name, **args}
        self._begun = now()

    def arrived(self, operation: str, sequence: int) -> None:
        if self._begun is not None and "waited" not in self._args:
            self._args["waited"] = micros(now() - self._begun)
        # Numbers are equal on all ranks. A sum has no time of arrival.
        is_due = sequence >= self._next_comparison
        if is_due or operation == "finalize":
            self._next_comparison = 2 * sequence
            self.compare_clocks()

    def release(self) -> None:
        self._other.release()

    def leave(self, error: BaseException | None = None) -> None:
        self._other.leave(error)
        if self._begun is None:
            return
        if error is not None:
            self._args["error"] = type(error).__name__
        category = "message" if "peer" in self._args else "collective"
        self._file.add_call(self._operation, category, self._begun, self._args)
        self._begun = None

    def compare_clocks(self) -> None:
        """Write how far the communicator's rank 0's clock is ahead of this rank's (collective).

        Each rank enters a barrier before any rank leaves it, which bounds the clocks'
        difference from both sides. The bounds cross if one clock is faster and a rank
        is stopped.
        """
        entered = []
        left = []
        for _ in range(ROUNDS):
            entered.append(now())
            self._comm.Barrier()
            left.append(now())
        first_entered, first_left = self._comm.bcast((entered, left))
        ahead = 0.0
        round_trip = 0.0  # twice the largest possible error
        if self._comm.rank > 0:
            most = min(map(sub, first_left, entered))
            least = max(map(sub, first_entered, left))
            ahead = (most + least) / 2
            round_trip = abs(most - least)
        zero = self._file.zero
        self._file.add_metadata(
            "chainermn clock",
            communicator=self.name,
            at=micros(entered[0] - zero),
            ahead=micros(ahead + zero),
            round_trip=micros(round_trip),
        )
