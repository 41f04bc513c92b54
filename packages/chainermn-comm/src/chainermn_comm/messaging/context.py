"""What the collective operations of one communicator work with."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpi4py import MPI

from ..topology import Topology
from .handshake import Handshake


@dataclass(frozen=True)
class Context:
    """The ranks of one communicator, and how they communicate.

    Attributes:
        comm: carries nothing but this package's traffic.
        handshake: among these ranks.
        tag: of the messages of collective operations.
        topology: which rank sits on which node.
        chunk_bytes: the size of chunks that the user asked for; None for each algorithm's default.
        interruptions: what interrupted collective steps on this rank; after one, ranks are out of
            step, and the communicator can't be used any more.
    """

    comm: MPI.Intracomm
    handshake: Handshake
    tag: int
    topology: Topology
    chunk_bytes: int | None = None
    interruptions: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.comm.size
