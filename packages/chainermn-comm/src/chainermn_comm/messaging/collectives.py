"""Collective operations on messages: a handshake that carries the headers, then the buffers.

Each function is collective. ``make`` builds this rank's message or messages; what it raises is
raised on all ranks before any data move.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from mpi4py import MPI

from ..arrays import as_integer
from ..errors import capture_error
from . import messages, transfer
from .context import Context
from .handshake import Signature
from .messages import Message

# From so many bytes on, ranks check that all of them could allocate before any data move: next to
# moving so much, a handshake costs nothing.
LARGE_BYTES = 64 << 20
# Up to so many bytes travel in the handshake's payload: copying them costs less than a transfer.
SMALL_BYTES = 16 << 10
_NBYTES = struct.Struct("<Q")

Value = TypeVar("Value")


def bcast(context: Context, operation: str, make: Callable[[], Message], root: int) -> Message:
    """Return root's message on every rank; only root calls ``make``."""
    index, error = capture_error(lambda: check_rank(context, root, "root"))
    message = None
    if context.rank == index:
        message, error = capture_error(make)
    payloads = _handshake(context, operation, _describe(message), error, index)
    payload = payloads[index]
    incoming = _with_memory(
        context,
        operation,
        [payload],
        lambda: message or messages.allocate(payload[_NBYTES.size :]),
    )
    for buffer in incoming.buffers:
        transfer.bcast(context.comm, buffer, index)
    return incoming


def allgather(context: Context, operation: str, make: Callable[[], Message]) -> list[Message]:
    """Return every rank's message on every rank."""
    message, error = capture_error(make)
    payload = _describe(message)
    if message is not None and _size_of(payload) <= SMALL_BYTES:
        payload += message.packed()
    payloads = _handshake(context, operation, payload, error)
    # Where the data of a small message begin in its payload.
    starts = {
        rank: len(each) - _size_of(each)
        for rank, each in enumerate(payloads)
        if _size_of(each) <= SMALL_BYTES
    }
    described = [each[: starts.get(rank)] for rank, each in enumerate(payloads)]
    outgoing = dict.fromkeys(range(context.size), message)
    incoming = _with_memory(
        context, operation, payloads, lambda: _incoming(context, outgoing, described)
    )
    for rank in starts.keys() - {context.rank}:
        incoming[rank].fill(payloads[rank][starts[rank] :])
    large = incoming.keys() - starts.keys()
    if large:
        _move(
            context,
            outgoing if context.rank in large else {},
            {rank: incoming[rank] for rank in sorted(large)},
        )
    return list(incoming.values())


def gather(
    context: Context, operation: str, make: Callable[[], Message], root: int
) -> list[Message] | None:
    """Return every rank's message at root; None elsewhere."""
    index, error = capture_error(lambda: check_rank(context, root, "root"))
    message = None
    if error is None:
        message, error = capture_error(make)
    payloads = _handshake(context, operation, _describe(message), error, index)
    assert message is not None  # else the handshake raised
    outgoing = {index: message}
    wanted = payloads if context.rank == index else []
    incoming = _with_memory(
        context, operation, payloads, lambda: _incoming(context, outgoing, wanted)
    )
    received = _move(context, outgoing, incoming)
    return received if context.rank == index else None


def scatter(
    context: Context, operation: str, make: Callable[[], Sequence[Message]], root: int
) -> Message:
    """Return root's i-th message on rank i; only root calls ``make``."""
    index, error = capture_error(lambda: check_rank(context, root, "root"))
    each: Sequence[Message] | None = None
    if context.rank == index:
        each, error = capture_error(make)
    outgoing = dict(enumerate(each or ()))
    payloads = _handshake(context, operation, _pack_size(outgoing.values()), error, index)
    headers = [message.header() for message in outgoing.values()] or None
    header = context.comm.scatter(headers, index)

    def allocate() -> dict[int, Message]:
        own = context.rank == index
        return {index: outgoing[index].copy() if own else messages.allocate(header)}

    return _move(context, outgoing, _with_memory(context, operation, payloads, allocate))[0]


def alltoall(
    context: Context, operation: str, make: Callable[[], Sequence[Message]]
) -> list[Message]:
    """Return the i-th message of each rank on rank i."""
    each, error = capture_error(make)
    payloads = _handshake(context, operation, _pack_size(each or ()), error)
    headers = context.comm.alltoall([message.header() for message in each])
    outgoing = dict(enumerate(each))
    described = [b"\0" * _NBYTES.size + header for header in headers]
    incoming = _with_memory(
        context, operation, payloads, lambda: _incoming(context, outgoing, described)
    )
    return _move(context, outgoing, incoming)


def check_rank(context: Context, rank: int, name: str) -> int:
    """Return the rank as an int.

    Raises:
        ValueError: it is no integer, or none of the communicator's ranks.
    """
    index = as_integer(rank)
    if index is None or not 0 <= index < context.size:
        raise ValueError(
            f"rank {context.rank}: {name} must be an integer from 0 to {context.size - 1}, "
            f"got {rank!r}"
        )
    return index


def _handshake(
    context: Context,
    operation: str,
    payload: bytes,
    error: BaseException | None,
    root: int | None = None,
) -> list[bytes]:
    """Return every rank's payload, which begins with its data's size unless it is empty."""
    signature: Signature = () if root is None else (("root", root),)
    return context.handshake(operation, signature, payload, error, _size_of(payload))


def _describe(message: Message | None) -> bytes:
    """Return the size of the message's data and its header; nothing for no message."""
    return _pack_size([message]) + message.header() if message else b""


def _size_of(payload: bytes) -> int:
    """Return the size in bytes of the data that a payload describes."""
    return int(_NBYTES.unpack_from(payload)[0]) if payload else 0


def _pack_size(outgoing: Iterable[Message]) -> bytes:
    return _NBYTES.pack(sum(message.nbytes for message in outgoing))


def _with_memory(
    context: Context, operation: str, payloads: list[bytes], allocate: Callable[[], Value]
) -> Value:
    """Return what ``allocate`` returns; when much moves, ranks check first that all could."""
    if sum(map(_size_of, payloads)) < LARGE_BYTES:
        return allocate()
    value: Value
    value, error = capture_error(allocate)
    context.handshake(f"{operation}, memory", error=error)
    return value


def _incoming(
    context: Context, outgoing: dict[int, Message], described: list[bytes]
) -> dict[int, Message]:
    """Return an empty message for each that is described; a copy of this rank's own."""
    return {
        rank: outgoing[rank].copy()
        if rank == context.rank
        else messages.allocate(payload[_NBYTES.size :])
        for rank, payload in enumerate(described)
    }


def _move(
    context: Context, outgoing: dict[int, Message], incoming: dict[int, Message]
) -> list[Message]:
    """Send messages by rank and fill those that come; return the latter in their order."""

    def buffers(by_rank: dict[int, Message]) -> list[tuple[int, transfer.Buffer]]:
        return [
            (rank, buffer)
            for rank, message in by_rank.items()
            if rank != context.rank
            for buffer in message.buffers
        ]

    MPI.Request.Waitall(
        transfer.start_exchange(context.comm, buffers(outgoing), buffers(incoming), context.tag)
    )
    return list(incoming.values())
