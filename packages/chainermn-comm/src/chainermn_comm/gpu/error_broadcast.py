"""Tells the other ranks of a failure while they wait for something else."""

from __future__ import annotations

from mpi4py import MPI

from ..errors import PeerError

# Characters of a failure. Messages must be so short that sending doesn't wait for the receiver.
LONGEST = 1000


class Alarm:
    """Messages of failures among the ranks of one communicator; no call waits for another rank.

    One alarm is all it is good for: the first failure is the last thing that the owner does.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Duplicate ``comm`` (collective)."""
        self._comm = comm.Dup()
        self.rank: int = self._comm.rank
        self._heard = False
        self._requests: list[MPI.Request] = []

    def ring(self, text: str) -> None:
        """Tell all ranks, unless this one heard of the failure from another."""
        if self._heard or self._requests:
            return
        others = [rank for rank in range(self._comm.size) if rank != self.rank]
        self._requests = [self._comm.isend(text[:LONGEST], rank) for rank in others]

    def check(self) -> None:
        """Raise PeerError if another rank has told of a failure."""
        status = MPI.Status()
        if not self._heard and self._comm.iprobe(status=status):
            self._heard = True
            text = self._comm.recv(source=status.source)
            raise PeerError(f"rank {status.source} failed: {text}")

    def close(self) -> bool:
        """Release the communicator (collective); whether any rank told of a failure.

        After a failure it isn't freed: there may be messages that nobody receives, since a rank
        that failed itself hasn't heard the others, and MPI gives the number of a communicator that
        was freed to the next one, which would receive them.
        """
        while not MPI.Request.Testall(self._requests):
            self._drain()
        failed = bool(self._comm.allreduce(self._heard or bool(self._requests), MPI.LOR))
        if not failed:
            self._comm.Free()
        return failed

    def _drain(self) -> None:
        status = MPI.Status()
        while self._comm.iprobe(status=status):
            self._comm.recv(source=status.source)
