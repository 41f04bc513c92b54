"""What the collective operations of one communicator work with."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from mpi4py import MPI

from ..topology import Topology
from .handshake import Handshake


@dataclass(frozen=True)
class Context:
    """The ranks of one communicator, and how they communicate."""

    comm: MPI.Intracomm  # carries nothing but this package's traffic
    handshake: Handshake
    tag: int  # of the messages of collective operations
    topology: Topology
    chunk_bytes: int | None = None  # what the user asked for; None for each algorithm's default
    # What interrupted collective steps on this rank: after one, ranks are out of step, and the
    # communicator can't be used any more.
    interruptions: list[str] = field(default_factory=list)

    @cached_property
    def rank(self) -> int:
        """This process's rank."""
        return self.comm.rank

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return self.comm.size
