"""Collective operations on messages: a handshake that carries the headers, then the buffers.

Each function is collective. ``make`` builds the messages of values; what it raises is raised on all
ranks before any data move. Where some rank sends arrays of a GPU, ranks check at the end that all
of them could put on theirs what has come.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias, TypeVar

from mpi4py import MPI

from ..arrays import integer_between
from ..errors import SharedFailure
from . import messages, transfer
from .context import Context
from .messages import Message

# The least bytes for which ranks check that all of them could allocate before any data move: beside
# such a transfer, a handshake costs nothing.
CONFIRMED_BYTES = 64 << 20
# The most bytes that travel in the handshake's payload: copying them costs less than a transfer.
SMALL_BYTES = 16 << 10
_PREFIX = struct.Struct("<Q?")  # bytes of a rank's data; whether some come from a GPU

Make: TypeAlias = Callable[[Sequence[Any]], list[Message]]
ByRank: TypeAlias = dict[int, Message]
Value = TypeVar("Value")


def bcast(context: Context, operation: str, value: Any, make: Make, root: int) -> Message:
    """Return the message of root's value on every rank."""
    message = None
    with SharedFailure(context.handshake, operation):
        root = check_rank(context, root, "root")
        if context.rank == root:
            (message,) = make([value])
        payload = _describe(message)
    payloads = _handshake(context, operation, payload, root)

    def allocate() -> Message:
        return message or messages.allocate(payloads[root][_PREFIX.size :])

    incoming = _with_memory(context, operation, payloads, allocate)

    def overwrite() -> None:
        for buffer in incoming.buffers:
            transfer.bcast_buffer(context.comm, buffer, root)

    context.run_in_step(operation, overwrite)
    return _on_devices(context, operation, payloads, [incoming])[0]


def allgather(context: Context, operation: str, value: Any, make: Make) -> list[Message]:
    """Return the message of every rank's value on every rank."""
    with SharedFailure(context.handshake, operation):
        (message,) = make([value])
        payload = _describe(message)
        if _size_of(payload) <= SMALL_BYTES:
            payload += message.packed()
    payloads = _handshake(context, operation, payload)
    # Where the data of a small message begin in its payload.
    sizes = list(map(_size_of, payloads))
    starts = {rank: len(payloads[rank]) - n for rank, n in enumerate(sizes) if n <= SMALL_BYTES}
    headers = {rank: each[_PREFIX.size : starts.get(rank)] for rank, each in enumerate(payloads)}
    outgoing = dict.fromkeys(range(context.size), message)
    incoming = _incoming(context, operation, payloads, outgoing, headers)
    for rank in starts.keys() - {context.rank}:
        incoming[rank].fill(payloads[rank][starts[rank] :])
    large = incoming.keys() - starts.keys()
    if large:
        sent = outgoing if context.rank in large else {}
        context.run_in_step(
            operation, _move, context, sent, {rank: incoming[rank] for rank in sorted(large)}
        )
    return _on_devices(context, operation, payloads, list(incoming.values()))


def gather(
    context: Context, operation: str, value: Any, make: Make, root: int
) -> list[Message] | None:
    """Return the message of every rank's value at root; None elsewhere."""
    with SharedFailure(context.handshake, operation):
        root = check_rank(context, root, "root")
        outgoing = dict(zip([root], make([value]), strict=True))
        payload = _describe(outgoing[root])
    payloads = _handshake(context, operation, payload, root)
    wanted = payloads if context.rank == root else []
    headers = {rank: each[_PREFIX.size :] for rank, each in enumerate(wanted)}
    incoming = _incoming(context, operation, payloads, outgoing, headers)
    received = context.run_in_step(operation, _move, context, outgoing, incoming)
    received = _on_devices(context, operation, payloads, received)
    return received if context.rank == root else None


def scatter(context: Context, operation: str, values: Any, make: Make, root: int) -> Message:
    """Return the message of root's i-th value on rank i."""
    with SharedFailure(context.handshake, operation):
        root = check_rank(context, root, "root")
        outgoing = _one_for_each(context, values, make) if context.rank == root else {}
    payloads = _handshake(context, operation, _prefix(outgoing.values()), root)
    headers = [message.header() for message in outgoing.values()] or None
    header = context.run_in_step(operation, context.comm.scatter, headers, root)
    incoming = _incoming(context, operation, payloads, outgoing, {root: header})
    received = context.run_in_step(operation, _move, context, outgoing, incoming)
    return _on_devices(context, operation, payloads, received)[0]


def alltoall(context: Context, operation: str, values: Any, make: Make) -> list[Message]:
    """Return the message of each rank's i-th value on rank i."""
    with SharedFailure(context.handshake, operation):
        outgoing = _one_for_each(context, values, make)
    payloads = _handshake(context, operation, _prefix(outgoing.values()))
    own = [message.header() for message in outgoing.values()]
    headers = context.run_in_step(operation, context.comm.alltoall, own)
    incoming = _incoming(context, operation, payloads, outgoing, dict(enumerate(headers)))
    received = context.run_in_step(operation, _move, context, outgoing, incoming)
    return _on_devices(context, operation, payloads, received)


def check_rank(context: Context, rank: Any, name: str) -> int:
    """Return one of the communicator's ranks as an int; raise ValueError if it is none."""
    return integer_between(rank, 0, context.size - 1, f"rank {context.rank}: {name}")


def _one_for_each(context: Context, values: Any, make: Make) -> ByRank:
    """Return the message for each rank; raise unless there are as many values as ranks."""
    if values is not None and not hasattr(values, "__len__"):
        raise TypeError(
            f"rank {context.rank}: expected a tuple or list of {context.size} values, one for each "
            f"rank, got {type(values).__name__}"
        )
    if values is None or len(values) != context.size:
        raise ValueError(
            f"rank {context.rank}: expected {context.size} values, one for each rank, got "
            f"{None if values is None else len(values)}"
        )
    return dict(enumerate(make(values)))


def _handshake(
    context: Context, operation: str, payload: bytes, root: int | None = None
) -> list[bytes]:
    """Return every rank's payload, which begins with a prefix unless it is empty."""
    signature = () if root is None else (("root", root),)
    arguments = operation, signature, payload, _size_of(payload)
    return context.run_in_step(operation, context.handshake, *arguments)


def _describe(message: Message | None) -> bytes:
    """Return the prefix and the header of a message; nothing for no message."""
    return _prefix([message]) + message.header() if message else b""


def _size_of(payload: bytes) -> int:
    """Return the size in bytes of the data that a payload describes."""
    return int(_PREFIX.unpack_from(payload)[0]) if payload else 0


def _prefix(outgoing: Collection[Message]) -> bytes:
    nbytes = sum([message.nbytes for message in outgoing])
    return _PREFIX.pack(nbytes, any([message.on_gpu for message in outgoing]))


def _with_memory(
    context: Context, operation: str, payloads: list[bytes], allocate: Callable[[], Value]
) -> Value:
    """Return what ``allocate`` returns; when much moves, ranks check first that all could."""
    if sum(map(_size_of, payloads)) < CONFIRMED_BYTES:
        return context.run_in_step(operation, allocate)
    return context.run_on_all_ranks(operation, "memory", allocate)


def _on_devices(
    context: Context, operation: str, payloads: list[bytes], received: list[Message]
) -> list[Message]:
    """Return messages with their arrays on GPUs; raise on all ranks where that fails on one."""
    if not any([payload and _PREFIX.unpack_from(payload)[1] for payload in payloads]):
        return received
    return context.run_on_all_ranks(
        operation, "copying to GPUs", lambda: messages.on_device(received, context.rank)
    )


def _incoming(
    context: Context,
    operation: str,
    payloads: list[bytes],
    outgoing: ByRank,
    headers: dict[int, bytes],
) -> ByRank:
    """Return an empty message for each header, by rank; a copy of this rank's own."""

    def allocate() -> ByRank:
        return {
            rank: outgoing[rank].copy() if rank == context.rank else messages.allocate(header)
            for rank, header in headers.items()
        }

    return _with_memory(context, operation, payloads, allocate)


def _move(context: Context, outgoing: ByRank, incoming: ByRank) -> list[Message]:
    """Send messages by rank and fill those that come; return the latter in their order."""

    def buffers(by_rank: ByRank) -> list[tuple[int, transfer.Buffer]]:
        return [(rank, buffer) for rank, message in by_rank.items() for buffer in message.buffers]

    MPI.Request.Waitall(
        transfer.start_exchange(context.comm, buffers(outgoing), buffers(incoming), context.tag)
    )
    return list(incoming.values())
