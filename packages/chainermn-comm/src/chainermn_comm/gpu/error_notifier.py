"""Notifies other ranks of a failure; they poll for it while they wait for something else."""

from __future__ import annotations

import threading

from mpi4py import MPI

from ..errors import PeerError

# Of an error's text. Messages must be so short that sending doesn't wait for the receiver.
MAX_CHARACTERS = 1000


class ErrorNotifier:
    """Serves for one failure, after which the owner does nothing any more.

    Only `close` waits for other ranks. Several threads may use it.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Duplicate ``comm`` (collective)."""
        self._comm = comm.Dup()
        self.rank: int = self._comm.rank
        self._lock = threading.Lock()  # one thread must not take the message that another has seen
        self._received = False
        self._text = ""  # of this rank's failure, or of that which it received
        self._requests: list[MPI.Request] = []

    def send(self, text: str) -> None:
        """Send the failure to all ranks, unless this one received it from another."""
        with self._lock:
            if self._received or self._requests:
                return
            others = [rank for rank in range(self._comm.size) if rank != self.rank]
            self._text = text[:MAX_CHARACTERS]
            self._requests = [self._comm.isend(text[:MAX_CHARACTERS], rank) for rank in others]

    def poll(self) -> None:
        """Raise PeerError if another rank has sent a failure (not collective)."""
        status = MPI.Status()
        with self._lock:
            if self._received or not self._comm.iprobe(status=status):
                return
            self._received = True
            self._text = text = self._comm.recv(source=status.source)
        raise PeerError(f"rank {status.source} failed: {text}")

    def close(self) -> str:
        """Release the communicator (collective); return a failure that a rank sent, else nothing.

        After a failure it isn't freed: there may be messages that nobody receives, since a rank
        that failed itself doesn't poll, and MPI gives the context id of a communicator that was
        freed to the next one, which would receive them.
        """
        status = MPI.Status()
        while not MPI.Request.Testall(self._requests):
            while self._comm.iprobe(status=status):
                self._comm.recv(source=status.source)  # as nobody polls any more
        texts = self._comm.allgather("" if self._received else self._text)
        told = [f"rank {rank} failed: {text}" for rank, text in enumerate(texts) if text]
        if not told:
            self._comm.Free()
        return "; ".join(told[:1])
