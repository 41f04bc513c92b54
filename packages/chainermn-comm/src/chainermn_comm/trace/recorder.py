"""Records the calls of traced communicators, beside the watchdog, which records those of all."""

from __future__ import annotations

import sys
from threading import get_ident
from typing import TYPE_CHECKING

from ..messaging import Handshake, Signature
from ..watchdog import NOBODY, CallRecorder
from . import clocks, events, file
from .events import Kind
from .file import TraceFile, now

if TYPE_CHECKING:  # importing it starts MPI
    from mpi4py import MPI

# Clocks drift: they are compared again at this collective call, at twice as many, and so on.
NEXT_COMPARISON = 64
FINALIZE = "finalize"
# Communicators that this process made, to give each a name.
_num_traced = 0


def call_recorder(comm: MPI.Intracomm, watchdogs: CallRecorder, folder: str | None) -> CallRecorder:
    """Return what records a communicator's calls (collective where it is traced).

    Args:
        comm: of the communicator, for its own traffic.
        watchdogs: the watchdog's recorder, which records them in any case.
        folder: of the trace; None on all ranks where there is none.
    """
    global _num_traced
    if folder is None:
        return watchdogs
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    _num_traced += 1
    mine = file.current()
    proposal = mine.run if mine is not None else file.new_run()
    everyone = comm.allgather((world.rank, _num_traced, proposal))
    name = f"{everyone[0][0]}.{everyone[0][1]}"
    mine = file.begin(folder, everyone[0][2], world.rank, world.size)
    # A process that was in another communicator before may have a file of that one's run.
    run, members = everyone[0][2], [rank for rank, *_ in everyone]
    mine.add_metadata(
        events.COMMUNICATOR, communicator=name, rank=comm.rank, ranks=members, run=run
    )
    made = TracedCallRecorder(watchdogs, mine, name)
    made.compare_clocks(comm)
    return made


def handshake(comm: MPI.Intracomm, record: CallRecorder) -> Handshake:
    """Return the handshake of a communicator whose calls ``record`` records."""
    kind = TracedHandshake if isinstance(record, TracedCallRecorder) else Handshake
    return kind(comm, record)


class TracedCallRecorder(CallRecorder):
    """Records each call for the trace, too."""

    __slots__ = (
        "_arrived",
        "_file",
        "_kind",
        "_name",
        "_queue",
        "_start",
        "_watchdogs",
    )

    def __init__(self, watchdogs: CallRecorder, into: TraceFile, name: str) -> None:
        super().__init__()
        self._watchdogs, self._file, self._name = watchdogs, into, name
        self._queue = into.add_call
        self._start = self._arrived = 0.0
        self._kind: Kind = ("", name, True, 0, NOBODY, NOBODY)

    def collective(
        self, operation: str, sequence: int, root: int = NOBODY, nbytes: int = 0
    ) -> None:
        self._watchdogs.collective(operation, sequence, root, nbytes)
        if not self._start:  # else it is a further step of the same call
            self.sequence = sequence
            self._kind = (operation, self._name, True, nbytes, root, NOBODY)
            self._arrived = 0.0
            self._start = now()

    def message(
        self, operation: str, peer: int, tag: int, nbytes: int = 0, inside: str = ""
    ) -> None:
        self._watchdogs.message(operation, peer, tag, nbytes, inside)
        self._kind = (operation, self._name, False, nbytes, peer, tag)
        self._start = now()

    def mark_arrived(self) -> None:
        """Record that all ranks have come to the collective call."""
        if not self._arrived:
            self._arrived = now()

    def leave(self) -> None:
        self._watchdogs.leave()
        start = self._start
        if start:
            end = now()
            self._start = 0.0
            raised = sys.exc_info()[0]
            error = None if raised is None else raised.__name__
            self._queue((self._kind, self.sequence, start, end, self._arrived, get_ident(), error))

    def release(self) -> None:
        self._watchdogs.release()

    def compare_clocks(self, comm: MPI.Intracomm) -> None:
        """Write how far this clock is from the communicator's rank 0's (collective)."""
        from mpi4py import MPI

        found = clocks.measure(comm, int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0))
        self._file.add_metadata(
            events.CLOCK,
            communicator=self._name,
            at=self._file.since_zero(found.at),
            # To be added to a time of this file for the time of rank 0's clock.
            ahead=round((found.ahead + self._file.zero) * 1e6, 3),
            round_trip=round(found.round_trip * 1e6, 3),
        )


class TracedHandshake(Handshake):
    """Tells a traced recorder when all ranks have come."""

    _record: TracedCallRecorder

    def __call__(
        self, operation: str, signature: Signature = (), payload: bytes = b"", nbytes: int = 0
    ) -> list[bytes]:
        try:
            payloads = _handshake(self, operation, signature, payload, nbytes)
        finally:
            self._record.mark_arrived()
        count = self._calls
        if operation == FINALIZE or (count >= NEXT_COMPARISON and not count & (count - 1)):
            self._record.compare_clocks(self._comm)
        return payloads

    def fail(self, operation: str, error: BaseException) -> None:
        try:
            super().fail(operation, error)
        finally:
            self._record.mark_arrived()


_handshake = Handshake.__call__
