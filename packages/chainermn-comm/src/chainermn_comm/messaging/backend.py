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
# Says whether arrays, or none, can stay on their GPUs: see :meth:`DeviceBackend.takes`.
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


class DeviceBackend(Backend):
    """Moves and sums arrays on GPUs, where all ranks can (see :meth:`takes`, :meth:`connect`).

    Results are there in the order of the current stream.
    """

    @abstractmethod
    def takes(self, arrays: Sequence[Any], op: Any = None) -> bool:
        """Return whether this rank can now take part with such arrays, or none (not collective).

        ``op`` is the ufunc of a sum. It can't while gradients travel in the background.
        """

    @abstractmethod
    def connect(self) -> bool:
        """Return whether the ranks are connected; the first call does that (collective)."""

    @abstractmethod
    def allreduce(
        self, sources: Sequence[Any], targets: Sequence[Any], op: Any, divisor: int = 1
    ) -> None:
        """Write what a ufunc makes of all ranks' sources, divided, into targets (collective)."""

    @abstractmethod
    def reduce_scatter(
        self, rows: Sequence[Sequence[Any]], targets: Sequence[Any], op: Any
    ) -> None:
        """Write what a ufunc makes of all ranks' rows for this rank into targets (collective)."""

    @abstractmethod
    def close(self) -> None:
        """Release everything (collective)."""

    @abstractmethod
    def release_local(self) -> None:
        """Release what needs no other rank (not collective)."""
