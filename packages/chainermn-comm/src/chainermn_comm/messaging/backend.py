"""What moves the arrays of collective calls: messages of MPI's, or something between GPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from mpi4py import MPI

from ..arithmetic import as_bytes
from . import messages, transfer

# Arrays, contiguous in C or Fortran order, each with the other rank.
Parts: TypeAlias = Iterable[tuple[int, Any]]
# Says whether arrays, or none, can stay on their GPUs: see :meth:`NcclBackend.takes`.
Takes: TypeAlias = Callable[[Sequence[Any]], bool]


class Backend(ABC):
    """Moves arrays among a communicator's ranks; each rank knows the sizes of what it gets.

    Between two ranks arrays are listed in the same order on both; a rank's own stay where they are.
    """

    @abstractmethod
    def allocate(self, header: bytes) -> messages.Message:
        """Return an empty message with that header, in this backend's kind of memory."""

    @abstractmethod
    def exchange(self, outgoing: Parts, incoming: Parts) -> None:
        """Send arrays, and overwrite those that come (collective)."""

    def allgather(self, outgoing: Parts, incoming: Parts) -> None:
        """Do that where a rank sends the same to all, and has a copy of it among what comes."""
        self.exchange(outgoing, incoming)

    @abstractmethod
    def broadcast(self, parts: Parts) -> None:
        """Overwrite each array on all ranks by that of the rank beside it (collective)."""


class HostBackend(Backend):
    """Messages of MPI's between arrays in host memory."""

    def __init__(self, comm: MPI.Intracomm, tag: int) -> None:
        self._comm, self._tag = comm, tag

    def allocate(self, header: bytes) -> messages.Message:
        return messages.allocate(header)

    def exchange(self, outgoing: Parts, incoming: Parts) -> None:
        sent, received = [
            [(rank, as_bytes(array)) for rank, array in parts] for parts in (outgoing, incoming)
        ]
        MPI.Request.Waitall(transfer.start_exchange(self._comm, sent, received, self._tag))

    def broadcast(self, parts: Parts) -> None:
        for root, array in parts:
            transfer.bcast_buffer(self._comm, as_bytes(array), root)
