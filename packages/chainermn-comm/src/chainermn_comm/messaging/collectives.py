"""Collective verbs on messages: ranks agree on the call and its frames, then the buffers move.

Each function is collective. ``make`` builds this rank's message or messages; what it raises is
raised on all ranks before any data move.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mpi4py import MPI

from . import messages, transfer
from .handshake import Agreement, View, prepare
from .integers import as_integer
from .messages import Message

# From so many bytes on, ranks agree that all of them had the memory before any data move: next
# to moving them, that costs nothing.
LARGE_BYTES = 64 << 20
# Up to so many go with the note of them: to copy them costs less than another transfer.
SMALL_BYTES = 16 << 10
_NBYTES = struct.Struct("<Q")

Value = TypeVar("Value")


@dataclass(frozen=True)
class Group:
    """The ranks of one communicator.

    Attributes:
        comm: carries nothing but this package's traffic.
        agreement: the agreement of these ranks.
        tag: of the messages of collectives.
        interruptions: of what all ranks do together; after one, ranks are at different steps.
    """

    comm: MPI.Intracomm
    agreement: Agreement
    tag: int
    interruptions: list[str] = field(default_factory=list)

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
    index, problem = prepare(lambda: check_rank(group, root, "root"))
    message = None
    if group.rank == index:
        message, problem = prepare(make)
    notes = _agree(group, operation, _note(message), problem, index)
    note = notes[index]
    incoming = _with_memory(
        group, operation, [note], lambda: message or messages.allocate(note[_NBYTES.size :])
    )
    transfer.bcast(group.comm, incoming, index)
    return incoming


def allgather(group: Group, operation: str, make: Callable[[], Message]) -> list[Message]:
    """Every rank's message on every rank."""
    message, problem = prepare(make)
    note = _note(message)
    if message is not None and _size_of(note) <= SMALL_BYTES:
        note += message.packed()
    notes = _agree(group, operation, note, problem)
    # Of a small payload, where it begins in the note.
    starts = {
        rank: len(note) - _size_of(note)
        for rank, note in enumerate(notes)
        if _size_of(note) <= SMALL_BYTES
    }
    framed = [note[: starts.get(rank)] for rank, note in enumerate(notes)]
    outgoing = dict.fromkeys(range(group.size), message)
    incoming = _with_memory(group, operation, notes, lambda: _incoming(group, outgoing, framed))
    for rank in starts.keys() - {group.rank}:
        incoming[rank].fill(notes[rank][starts[rank] :])
    large = incoming.keys() - starts.keys()
    if large:
        _move(
            group,
            outgoing if group.rank in large else {},
            {rank: incoming[rank] for rank in sorted(large)},
        )
    return list(incoming.values())


def gather(
    group: Group, operation: str, make: Callable[[], Message], root: int
) -> list[Message] | None:
    """Every rank's message at root; None elsewhere."""
    index, problem = prepare(lambda: check_rank(group, root, "root"))
    message = None
    if problem is None:
        message, problem = prepare(make)
    notes = _agree(group, operation, _note(message), problem, index)
    assert message is not None  # else there was a problem
    outgoing = {index: message}
    wanted = notes if group.rank == index else []
    incoming = _with_memory(group, operation, notes, lambda: _incoming(group, outgoing, wanted))
    received = _move(group, outgoing, incoming)
    return received if group.rank == index else None


def scatter(
    group: Group, operation: str, make: Callable[[], Sequence[Message]], root: int
) -> Message:
    """Root's i-th message on rank i; only root calls ``make``."""
    index, problem = prepare(lambda: check_rank(group, root, "root"))
    each: Sequence[Message] | None = None
    if group.rank == index:
        each, problem = prepare(make)
    outgoing = dict(enumerate(each or ()))
    notes = _agree(group, operation, _size_note(outgoing.values()), problem, index)
    frames = [message.frame() for message in outgoing.values()] or None
    frame = group.comm.scatter(frames, index)

    def allocate() -> dict[int, Message]:
        own = group.rank == index
        return {index: outgoing[index].copy() if own else messages.allocate(frame)}

    return _move(group, outgoing, _with_memory(group, operation, notes, allocate))[0]


def alltoall(group: Group, operation: str, make: Callable[[], Sequence[Message]]) -> list[Message]:
    """The i-th message of each rank on rank i."""
    each, problem = prepare(make)
    notes = _agree(group, operation, _size_note(each or ()), problem)
    frames = group.comm.alltoall([message.frame() for message in each])
    outgoing = dict(enumerate(each))
    framed = [b"\0" * _NBYTES.size + frame for frame in frames]
    incoming = _with_memory(group, operation, notes, lambda: _incoming(group, outgoing, framed))
    return _move(group, outgoing, incoming)


def check_rank(group: Group, rank: int, name: str) -> int:
    """The rank as an int; ValueError unless it is one of the group's."""
    index = as_integer(rank)
    if index is None or not 0 <= index < group.size:
        raise ValueError(
            f"rank {group.rank}: {name} must be an integer from 0 to {group.size - 1}, got {rank!r}"
        )
    return index


def _agree(
    group: Group,
    operation: str,
    note: bytes,
    problem: BaseException | None,
    root: int | None = None,
) -> list[bytes]:
    """Every rank's note, which begins with the payload's size unless it is empty."""
    view: View = () if root is None else (("root", root),)
    return group.agreement(operation, view, note, problem, _size_of(note))


def _note(message: Message | None) -> bytes:
    """Payload of the message in bytes, and its frame; nothing for no message."""
    return _size_note([message]) + message.frame() if message else b""


def _size_of(note: bytes) -> int:
    """The payload of which a note tells."""
    return int(_NBYTES.unpack_from(note)[0]) if note else 0


def _size_note(outgoing: Iterable[Message]) -> bytes:
    return _NBYTES.pack(sum(array.nbytes for message in outgoing for array in message.arrays))


def _with_memory(
    group: Group, operation: str, notes: list[bytes], allocate: Callable[[], Value]
) -> Value:
    """What ``allocate`` returns; when much moves, ranks agree that all could."""
    if sum(map(_size_of, notes)) < LARGE_BYTES:
        return allocate()
    value: Value
    value, problem = prepare(allocate)
    group.agreement(f"{operation}, memory", problem=problem)
    return value


def _incoming(group: Group, outgoing: dict[int, Message], notes: list[bytes]) -> dict[int, Message]:
    """Room for the message of each note; a copy of the own one."""
    return {
        rank: outgoing[rank].copy()
        if rank == group.rank
        else messages.allocate(note[_NBYTES.size :])
        for rank, note in enumerate(notes)
    }


def _move(
    group: Group, outgoing: dict[int, Message], incoming: dict[int, Message]
) -> list[Message]:
    """Send messages by rank and fill those that come, which are returned in their order."""
    own = {group.rank}
    transfer.transfer(
        group.comm,
        {rank: outgoing[rank] for rank in outgoing.keys() - own},
        {rank: incoming[rank] for rank in incoming.keys() - own},
        group.tag,
    )
    return list(incoming.values())
