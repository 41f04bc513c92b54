"""Collective operations on messages: a handshake that carries the headers, then the arrays.

Each function is collective. ``make`` builds the messages of values; what it raises is raised on all
ranks before any data move. Arrays on GPUs stay there where those of all ranks can; else they pass
through host memory. Of objects, and of what passed there, ranks check at the end that all of them
could unpickle what has come, or put it on their GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, TypeVar

from ..arrays import integer_between
from ..errors import SharedFailure
from . import messages
from .backend import Backend, Parts, Takes
from .context import Context
from .messages import Message

# The least bytes for which ranks check that all of them could allocate before any data move: beside
# such a transfer, a handshake costs nothing.
CONFIRMED_BYTES = 64 << 20
# The most bytes that travel in the handshake's payload: copying them costs less than a transfer.
SMALL_BYTES = 16 << 10
_PREFIX = struct.Struct("<QB")  # bytes of a rank's data, and where they lie
# Some came from a GPU, and are in host memory now; they are still there; they could stay there.
COPIED, STAYS, CAN_STAY = 1, 2, 4

Make: TypeAlias = Callable[[Sequence[Any], int, Takes | None], list[Message]]
ByRank: TypeAlias = dict[int, Message]
Value = TypeVar("Value")


def bcast(context: Context, operation: str, value: Any, make: Make, root: int) -> Any:
    """Return root's value on every rank."""
    with context.in_step(operation), _turn(context, make) as takes:
        outgoing: ByRank = {}
        with SharedFailure(context.handshake, operation):
            root = check_rank(context, root, "root")
            if context.rank == root:
                outgoing = {root: make([value], context.rank, takes)[0]}
            payload = _prefix(outgoing, takes) + b"".join(m.header() for m in outgoing.values())
        payloads = _handshake(context, operation, payload, root)
        backend = _agreed(context, operation, payloads, outgoing)

        header = payloads[root][_PREFIX.size :]
        incoming = _with_memory(
            context, operation, payloads, lambda: outgoing.get(root) or backend.allocate(header)
        )
        backend.broadcast([(root, array) for array in incoming.arrays])
        is_own = make is messages.of_objects and context.rank == root
        received = [] if is_own else [incoming]
        values = _values(context, operation, payloads, received, make, backend)
        return value if is_own else values[0]


def allgather(context: Context, operation: str, value: Any, make: Make) -> list[Any]:
    """Return every rank's value on every rank."""
    with context.in_step(operation), _turn(context, make) as takes:
        with SharedFailure(context.handshake, operation):
            own = {context.rank: make([value], context.rank, takes)[0]}
            payload = _prefix(own, takes) + own[context.rank].header()
            if _is_inline(payload):
                payload += own[context.rank].packed()
        payloads = _handshake(context, operation, payload)
        backend = _agreed(context, operation, payloads, own)
        # Where the data of a small message begin in its payload.
        starts = {
            rank: len(each) - _size_of(each)
            for rank, each in enumerate(payloads)
            if _is_inline(each)
        }
        headers = {
            rank: each[_PREFIX.size : starts.get(rank)] for rank, each in enumerate(payloads)
        }
        outgoing = dict.fromkeys(range(context.size), own[context.rank])
        incoming = _incoming(context, operation, payloads, outgoing, headers, backend)
        for rank in starts.keys() - {context.rank}:
            incoming[rank].fill(payloads[rank][starts[rank] :])
        large = incoming.keys() - starts.keys()
        if large:
            sent = outgoing if context.rank in large else {}
            backend.allgather(
                _parts(sent), _parts({rank: incoming[rank] for rank in sorted(large)})
            )
        return _values(context, operation, payloads, list(incoming.values()), make, backend)


def gather(context: Context, operation: str, value: Any, make: Make, root: int) -> list[Any] | None:
    """Return every rank's value at root; None elsewhere."""
    with context.in_step(operation), _turn(context, make) as takes:
        with SharedFailure(context.handshake, operation):
            root = check_rank(context, root, "root")
            outgoing = dict(zip([root], make([value], context.rank, takes), strict=True))
            payload = _prefix(outgoing, takes) + outgoing[root].header()
        payloads = _handshake(context, operation, payload, root)
        wanted = payloads if context.rank == root else []
        headers = {rank: each[_PREFIX.size :] for rank, each in enumerate(wanted)}
        values = _exchanged(context, operation, payloads, outgoing, headers, make)
        return values if context.rank == root else None


def scatter(context: Context, operation: str, values: Any, make: Make, root: int) -> Any:
    """Return root's i-th value on rank i."""
    with context.in_step(operation), _turn(context, make) as takes:
        with SharedFailure(context.handshake, operation):
            root = check_rank(context, root, "root")
            outgoing = one_for_each(context, values, make, takes) if context.rank == root else {}
        payloads = _handshake(context, operation, _prefix(outgoing, takes), root)
        headers = [message.header() for message in outgoing.values()] or None
        header = context.comm.scatter(headers, root)
        return _exchanged(context, operation, payloads, outgoing, {root: header}, make)[0]


def alltoall(context: Context, operation: str, values: Any, make: Make) -> list[Any]:
    """Return each rank's i-th value on rank i."""
    with context.in_step(operation), _turn(context, make) as takes:
        with SharedFailure(context.handshake, operation):
            outgoing = one_for_each(context, values, make, takes)
        payloads = _handshake(context, operation, _prefix(outgoing, takes))
        own = [message.header() for message in outgoing.values()]
        headers = dict(enumerate(context.comm.alltoall(own)))
        return _exchanged(context, operation, payloads, outgoing, headers, make)


def check_rank(context: Context, rank: Any, name: str) -> int:
    """Return one of the communicator's ranks as an int; raise ValueError if it is none."""
    return integer_between(rank, 0, context.size - 1, f"rank {context.rank}: {name}")


def places_of(outgoing: Collection[Message], takes: Takes | None) -> int:
    """Return where this rank's arrays lie, which were made for ``takes``; for :func:`agreed`."""
    if any([message.stays for message in outgoing]):
        return STAYS | CAN_STAY
    copied = COPIED if any([message.on_gpu for message in outgoing]) else 0
    # A rank without arrays takes part in any way.
    has_arrays = takes is None or any([message.arrays for message in outgoing])
    return copied if has_arrays or takes is None or not takes([]) else CAN_STAY


def agreed(
    context: Context, operation: str, places: Sequence[int], outgoing: list[Message]
) -> tuple[Backend, list[Message]]:
    """Return what moves the arrays, and the messages as it takes them; ``places`` are by rank."""
    device = context.device
    if not any([place & STAYS for place in places]):
        return context.host, outgoing
    if device is not None and all([place & CAN_STAY for place in places]) and device.connect():
        return device, outgoing
    part, rank = "copying to host memory", context.rank
    copied = context.run_on_all_ranks(operation, lambda: messages.on_host(outgoing, rank), part)
    return context.host, copied


def one_for_each(context: Context, values: Any, make: Make, takes: Takes | None = None) -> ByRank:
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
    return dict(enumerate(make(values, context.rank, takes)))


def _turn(context: Context, make: Make) -> AbstractContextManager[Takes | None]:
    return nullcontext() if make is messages.of_objects else context.device_turn()


def _handshake(
    context: Context, operation: str, payload: bytes, root: int | None = None
) -> list[bytes]:
    """Return every rank's payload, which begins with a prefix unless it is empty."""
    signature = () if root is None else (("root", root),)
    return context.handshake(operation, signature, payload, _size_of(payload))


def _agreed(context: Context, operation: str, payloads: list[bytes], outgoing: ByRank) -> Backend:
    """Return what moves the arrays; it may replace the messages by copies in host memory."""
    places = [payload[_PREFIX.size - 1] for payload in payloads]
    backend, found = agreed(context, operation, places, list(outgoing.values()))
    outgoing.update(zip(outgoing, found, strict=True))
    return backend


def _size_of(payload: bytes) -> int:
    """Return the size in bytes of the data that a payload describes."""
    return int(_PREFIX.unpack_from(payload)[0])


def _is_inline(payload: bytes) -> bool:
    """Return whether the data are in the payload."""
    nbytes, place = _PREFIX.unpack_from(payload)
    return bool(nbytes <= SMALL_BYTES and not place & STAYS)


def _prefix(outgoing: ByRank, takes: Takes | None) -> bytes:
    nbytes = sum([message.nbytes for message in outgoing.values()])
    return _PREFIX.pack(nbytes, places_of(outgoing.values(), takes))


def _with_memory(
    context: Context, operation: str, payloads: list[bytes], allocate: Callable[[], Value]
) -> Value:
    """Return what ``allocate`` returns; when much moves, ranks check first that all could."""
    if sum(map(_size_of, payloads)) < CONFIRMED_BYTES:
        return allocate()
    return context.run_on_all_ranks(operation, allocate, "memory")


def _values(
    context: Context,
    operation: str,
    payloads: list[bytes],
    received: list[Message],
    make: Make,
    backend: Backend,
) -> list[Any]:
    """Return what messages hold; raise on all ranks where one can't unpickle or use its GPU."""
    if backend is not context.host:
        return [message.value() for message in received]

    def unpack() -> list[Any]:
        return [message.value() for message in messages.on_device(received, context.rank)]

    if make is messages.of_objects:
        return context.run_on_all_ranks(operation, unpack, "unpickling")
    if any([payload[_PREFIX.size - 1] & (COPIED | STAYS) for payload in payloads]):
        return context.run_on_all_ranks(operation, unpack, "copying to GPUs")
    return unpack()


def _incoming(
    context: Context,
    operation: str,
    payloads: list[bytes],
    outgoing: ByRank,
    headers: dict[int, bytes],
    backend: Backend,
) -> ByRank:
    """Return an empty message for each header, by rank; a copy of this rank's own."""

    def allocate() -> ByRank:
        return {
            rank: outgoing[rank].copy() if rank == context.rank else backend.allocate(header)
            for rank, header in headers.items()
        }

    return _with_memory(context, operation, payloads, allocate)


def _exchanged(
    context: Context,
    operation: str,
    payloads: list[bytes],
    outgoing: ByRank,
    headers: dict[int, bytes],
    make: Make,
) -> list[Any]:
    """Send messages by rank; return the values of those that come, in the order of headers."""
    backend = _agreed(context, operation, payloads, outgoing)
    incoming = _incoming(context, operation, payloads, outgoing, headers, backend)
    backend.exchange(_parts(outgoing), _parts(incoming))
    return _values(context, operation, payloads, list(incoming.values()), make, backend)


def _parts(by_rank: ByRank) -> Parts:
    return [(rank, array) for rank, message in by_rank.items() for array in message.arrays]
