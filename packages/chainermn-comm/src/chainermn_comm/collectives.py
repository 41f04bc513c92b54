"""Collective verbs on messages: ranks agree on the call and its frames, then the buffers move.

Each function is collective. ``make`` builds this rank's message or messages; what it raises is
raised on all ranks before any data move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpi4py import MPI

from . import exchange, messages
from .agreement import Agreement, prepare
from .messages import Message


@dataclass(frozen=True)
class Group:
    """The ranks of one communicator.

    Attributes:
        comm: carries nothing but this package's traffic.
        agreement: the agreement of these ranks.
        tag: of the messages of collectives.
    """

    comm: MPI.Intracomm
    agreement: Agreement
    tag: int

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.comm.size


def bcast(group: Group, operation: str, make: Callable[[], Message], root: int) -> Message:
    """Root's message on every rank; only root calls ``make``."""

    def mine() -> Message | None:
        check_rank(group, root, "root")
        return make() if group.rank == root else None

    message, problem = prepare(mine)
    note = message.frame() if message else b""
    notes = group.agreement(operation, [("root", root)], note, problem)
    if message is None:
        message = messages.allocate(notes[root])
    exchange.bcast(group.comm, message, root)
    return message


def allgather(group: Group, operation: str, make: Callable[[], Message]) -> list[Message]:
    """Every rank's message on every rank."""
    message, problem = prepare(make)
    notes = group.agreement(operation, note=message.frame() if message else b"", problem=problem)
    return _move(group, {rank: message for rank in range(group.size)}, dict(enumerate(notes)))


def gather(
    group: Group, operation: str, make: Callable[[], Message], root: int
) -> list[Message] | None:
    """Every rank's message at root; None elsewhere."""

    def mine() -> Message:
        check_rank(group, root, "root")
        return make()

    message, problem = prepare(mine)
    note = message.frame() if message else b""
    notes = group.agreement(operation, [("root", root)], note, problem)
    if group.rank != root:
        _move(group, {root: message}, {})
        return None
    return _move(group, {root: message}, dict(enumerate(notes)))


def scatter(
    group: Group, operation: str, make: Callable[[], Sequence[Message]], root: int
) -> Message:
    """Root's i-th message on rank i; only root calls ``make``."""

    def mine() -> Sequence[Message]:
        check_rank(group, root, "root")
        return make() if group.rank == root else ()

    outgoing, problem = prepare(mine)
    group.agreement(operation, [("root", root)], problem=problem)
    frames = [message.frame() for message in outgoing] if group.rank == root else None
    frame = group.comm.scatter(frames, root)
    return _move(group, dict(enumerate(outgoing)), {root: frame})[0]


def alltoall(group: Group, operation: str, make: Callable[[], Sequence[Message]]) -> list[Message]:
    """The i-th message of each rank on rank i."""
    outgoing, problem = prepare(make)
    group.agreement(operation, problem=problem)
    frames = group.comm.alltoall([message.frame() for message in outgoing])
    return _move(group, dict(enumerate(outgoing)), dict(enumerate(frames)))


def check_rank(group: Group, rank: int, name: str) -> None:
    """Raise ValueError unless ``rank`` is one of the group's."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < group.size:
        raise ValueError(
            f"rank {group.rank}: {name} must be an integer from 0 to {group.size - 1}, got {rank!r}"
        )


def _move(group: Group, outgoing: dict[int, Message], frames: dict[int, bytes]) -> list[Message]:
    """Send messages by rank and receive those framed, in the order of ``frames``."""
    incoming = {
        rank: outgoing[rank].copy() if rank == group.rank else messages.allocate(frame)
        for rank, frame in frames.items()
    }
    own = {group.rank}
    exchange.transfer(
        group.comm,
        {rank: outgoing[rank] for rank in outgoing.keys() - own},
        {rank: incoming[rank] for rank in incoming.keys() - own},
        group.tag,
    )
    return list(incoming.values())
