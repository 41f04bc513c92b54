"""Collective operations on messages: a handshake that carries the headers, then the buffers.

Each function is collective. ``make`` builds the messages of values; what it raises is raised on all
ranks before any data move. Of objects, and where some rank sends arrays of a GPU, ranks check at
the end that all of them could unpickle what has come, or put it on their GPU.
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


def bcast(context: Context, operation: str, value: Any, make: Make, root: int) -> Any:
    """Return root's value on every rank."""
    with context.in_step(operation):
        message = None
        with SharedFailure(context.handshake, operation):
            root = check_rank(context, root, "root")
            if context.rank == root:
                (message,) = make([value])
            payload = _describe(message)
        payloads = _handshake(context, operation, payload, root)

        header = payloads[root][_PREFIX.size :]
        incoming = _with_memory(
            context, operation, payloads, lambda: message or messages.allocate(header)
        )
        for buffer in incoming.buffers:
            transfer.bcast_buffer(context.comm, buffer, root)
        is_own = make is messages.of_objects and context.rank == root
        received = _values(context, operation, payloads, [] if is_own else [incoming], make)
        return value if is_own else received[0]


def allgather(context: Context, operation: str, value: Any, make: Make) -> list[Any]:
    """Return every rank's value on every rank."""
    with context.in_step(operation):
        with SharedFailure(context.handshake, operation):
            (message,) = make([value])
            payload = _describe(message)
            if _size_of(payload) <= SMALL_BYTES:
                payload += message.packed()
        payloads = _handshake(context, operation, payload)
        # Where the data of a small message begin in its payload.
        sizes = list(map(_size_of, payloads))
        starts = {rank: len(payloads[rank]) - n for rank, n in enumerate(sizes) if n <= SMALL_BYTES}
        headers = {
            rank: each[_PREFIX.size : starts.get(rank)] for rank, each in enumerate(payloads)
        }
        outgoing = dict.fromkeys(range(context.size), message)
        incoming = _incoming(context, operation, payloads, outgoing, headers)
        for rank in starts.keys() - {context.rank}:
            incoming[rank].fill(payloads[rank][starts[rank] :])
        large = incoming.keys() - starts.keys()
        if large:
            sent = outgoing if context.rank in large else {}
            _move(context, sent, {rank: incoming[rank] for rank in sorted(large)})
        return _values(context, operation, payloads, list(incoming.values()), make)


def gather(context: Context, operation: str, value: Any, make: Make, root: int) -> list[Any] | None:
    """Return every rank's value at root; None elsewhere."""
    with context.in_step(operation):
        with SharedFailure(context.handshake, operation):
            root = check_rank(context, root, "root")
            outgoing = dict(zip([root], make([value]), strict=True))
            payload = _describe(outgoing[root])
        payloads = _handshake(context, operation, payload, root)
        wanted = payloads if context.rank == root else []
        headers = {rank: each[_PREFIX.size :] for rank, each in enumerate(wanted)}
        incoming = _incoming(context, operation, payloads, outgoing, headers)
        received = _move(context, outgoing, incoming)
        values = _values(context, operation, payloads, received, make)
        return values if context.rank == root else None


def scatter(context: Context, operation: str, values: Any, make: Make, root: int) -> Any:
    """Return root's i-th value on rank i."""
    with context.in_step(operation):
        with SharedFailure(context.handshake, operation):
            root = check_rank(context, root, "root")
            outgoing = one_for_each(context, values, make) if context.rank == root else {}
        payloads = _handshake(context, operation, _prefix(outgoing.values()), root)
        headers = [message.header() for message in outgoing.values()] or None
        header = context.comm.scatter(headers, root)
        incoming = _incoming(context, operation, payloads, outgoing, {root: header})
        received = _move(context, outgoing, incoming)
        return _values(context, operation, payloads, received, make)[0]


def alltoall(context: Context, operation: str, values: Any, make: Make) -> list[Any]:
    """Return each rank's i-th value on rank i."""
    with context.in_step(operation):
        with SharedFailure(context.handshake, operation):
            outgoing = one_for_each(context, values, make)
        payloads = _handshake(context, operation, _prefix(outgoing.values()))
        own = [message.header() for message in outgoing.values()]
        headers = context.comm.alltoall(own)
        incoming = _incoming(context, operation, payloads, outgoing, dict(enumerate(headers)))
        received = _move(context, outgoing, incoming)
        return _values(context, operation, payloads, received, make)


def check_rank(context: Context, rank: Any, name: str) -> int:
    """Return one of the communicator's ranks as an int; raise ValueError if it is none."""
    return integer_between(rank, 0, context.size - 1, f"rank {context.rank}: {name}")


def one_for_each(context: Context, values: Any, make: Make) -> ByRank:
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
    return context.handshake(operation, signature, payload, _size_of(payload))


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
        return allocate()
    return context.run_on_all_ranks(operation, allocate, "memory")


def _values(
    context: Context, operation: str, payloads: list[bytes], received: list[Message], make: Make
) -> list[Any]:
    """Return what messages hold; raise on all ranks where one can't unpickle or use its GPU."""

    def unpack() -> list[Any]:
        return [message.value() for message in messages.on_device(received, context.rank)]

    if make is messages.of_objects:
        return context.run_on_all_ranks(operation, unpack, "unpickling")
    if any([payload and _PREFIX.unpack_from(payload)[1] for payload in payloads]):
        return context.run_on_all_ranks(operation, unpack, "copying to GPUs")
    return unpack()


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
