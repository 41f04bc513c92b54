"""Collective operations on messages: a handshake that carries the headers, then the arrays.

Each function is collective. ``make`` builds the messages of values; what it raises is raised on all
ranks before any data move. Arrays on GPUs stay there where those of all ranks can; else they pass
through host memory. Of objects, and of what passed there, ranks check at the end that all of them
could unpickle what has come, or put it on their GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias, TypeVar

from ..arrays import integer_between
from ..errors import SharedFailure
from . import messages
from .backend import Backend, Parts, Takes
from .messages import Message
from .process_group import ProcessGroup

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


def bcast(group: ProcessGroup, operation: str, value: Any, make: Make, root: int) -> Any:
    """Return root's value on every rank."""
    takes = None if make is messages.of_objects else group.device_takes
    with group.in_step(operation):
        outgoing: ByRank = {}
        with SharedFailure(group.handshake, operation):
            root = check_rank(group, root, "root")
            if group.rank == root:
                outgoing = {root: make([value], group.rank, takes)[0]}
            payload = _prefix(outgoing, takes)
            if outgoing:
                payload += outgoing[root].header()
        payloads = _handshake(group, operation, payload, root)
        backend, copied = _agreed(group, operation, payloads, outgoing)

        header = payloads[root][_PREFIX.size :]
        incoming = _with_memory(
            group, operation, payloads, lambda: outgoing.get(root) or backend.allocate(header)
        )
        backend.broadcast([(root, array) for array in incoming.arrays])
        is_own = make is messages.of_objects and group.rank == root
        received = [] if is_own else [incoming]
        values = _values(group, operation, copied, received, make)
        return value if is_own else values[0]


def allgather(group: ProcessGroup, operation: str, value: Any, make: Make) -> list[Any]:
    """Return every rank's value on every rank."""
    takes = None if make is messages.of_objects else group.device_takes
    with group.in_step(operation):
        with SharedFailure(group.handshake, operation):
            own = {group.rank: make([value], group.rank, takes)[0]}
            payload = _prefix(own, takes) + own[group.rank].header()
            if _is_inline(payload):
                payload += own[group.rank].packed()
        payloads = _handshake(group, operation, payload)
        backend, copied = _agreed(group, operation, payloads, own)
        # Where the data of a small message begin in its payload.
        starts = {
            rank: len(each) - _size_of(each)
            for rank, each in enumerate(payloads)
            if _is_inline(each)
        }
        headers = {
            rank: each[_PREFIX.size : starts.get(rank)] for rank, each in enumerate(payloads)
        }
        outgoing = dict.fromkeys(range(group.size), own[group.rank])
        incoming = _incoming(group, operation, payloads, outgoing, headers, backend)
        for rank in starts.keys() - {group.rank}:
            incoming[rank].fill(payloads[rank][starts[rank] :])
        large = incoming.keys() - starts.keys()
        if large:
            sent = outgoing if group.rank in large else {}
            backend.allgather(
                _parts(sent), _parts({rank: incoming[rank] for rank in sorted(large)})
            )
        return _values(group, operation, copied, list(incoming.values()), make)


def gather(
    group: ProcessGroup, operation: str, value: Any, make: Make, root: int
) -> list[Any] | None:
    """Return every rank's value at root; None elsewhere."""
    takes = None if make is messages.of_objects else group.device_takes
    with group.in_step(operation):
        with SharedFailure(group.handshake, operation):
            root = check_rank(group, root, "root")
            outgoing = dict(zip([root], make([value], group.rank, takes), strict=True))
            payload = _prefix(outgoing, takes) + outgoing[root].header()
        payloads = _handshake(group, operation, payload, root)
        wanted = payloads if group.rank == root else []
        headers = {rank: each[_PREFIX.size :] for rank, each in enumerate(wanted)}
        values = _exchanged(group, operation, payloads, outgoing, headers, make)
        return values if group.rank == root else None


def scatter(group: ProcessGroup, operation: str, values: Any, make: Make, root: int) -> Any:
    """Return root's i-th value on rank i."""
    takes = None if make is messages.of_objects else group.device_takes
    with group.in_step(operation):
        with SharedFailure(group.handshake, operation):
            root = check_rank(group, root, "root")
            outgoing = one_for_each(group, values, make, takes) if group.rank == root else {}
        payloads = _handshake(group, operation, _prefix(outgoing, takes), root)
        headers = [message.header() for message in outgoing.values()] or None
        header = group.comm.scatter(headers, root)
        return _exchanged(group, operation, payloads, outgoing, {root: header}, make)[0]


def alltoall(group: ProcessGroup, operation: str, values: Any, make: Make) -> list[Any]:
    """Return each rank's i-th value on rank i."""
    takes = None if make is messages.of_objects else group.device_takes
    with group.in_step(operation):
        with SharedFailure(group.handshake, operation):
            outgoing = one_for_each(group, values, make, takes)
        payloads = _handshake(group, operation, _prefix(outgoing, takes))
        own = [message.header() for message in outgoing.values()]
        headers = dict(enumerate(group.comm.alltoall(own)))
        return _exchanged(group, operation, payloads, outgoing, headers, make)


def check_rank(group: ProcessGroup, rank: Any, name: str) -> int:
    """Return one of the communicator's ranks as an int; raise ValueError if it is none."""
    return integer_between(rank, 0, group.size - 1, f"rank {group.rank}: {name}")


def places_of(outgoing: Collection[Message], takes: Takes | None) -> int:
    """Return where this rank's arrays lie, which were made for ``takes``; for :func:`agreed`."""
    for message in outgoing:
        if message.on_gpu:  # if one of them stays all do
            return STAYS | CAN_STAY if message.stays else COPIED
    # A rank without arrays takes part in any way.
    is_empty = takes is not None and not any([message.arrays for message in outgoing])
    return CAN_STAY if is_empty and takes is not None and takes([]) else 0


def agreed(
    group: ProcessGroup, operation: str, places: Sequence[int], outgoing: list[Message]
) -> tuple[Backend, list[Message]]:
    """Return what moves the arrays, and the messages as it takes them; ``places`` are by rank."""
    device = group.device
    if not any([place & STAYS for place in places]):
        return group.host, outgoing
    if device is not None and all([place & CAN_STAY for place in places]) and device.connect():
        return device, outgoing
    part, rank = "copying to host memory", group.rank
    copied = group.run_on_all_ranks(operation, lambda: messages.on_host(outgoing, rank), part)
    return group.host, copied


def one_for_each(
    group: ProcessGroup, values: Any, make: Make, takes: Takes | None = None
) -> ByRank:
    """Return the message for each rank; raise unless there are as many values as ranks."""
    if values is not None and not hasattr(values, "__len__"):
        raise TypeError(
            f"rank {group.rank}: expected a tuple or list of {group.size} values, one for each "
            f"rank, got {type(values).__name__}"
        )
    if values is None or len(values) != group.size:
        raise ValueError(
            f"rank {group.rank}: expected {group.size} values, one for each rank, got "
            f"{None if values is None else len(values)}"
        )
    return dict(enumerate(make(values, group.rank, takes)))


def _handshake(
    group: ProcessGroup, operation: str, payload: bytes, root: int | None = None
) -> list[bytes]:
    """Return every rank's payload, which begins with a prefix unless it is empty."""
    signature = () if root is None else (("root", root),)
    return group.handshake(operation, signature, payload, _size_of(payload))


def _agreed(
    group: ProcessGroup, operation: str, payloads: list[bytes], outgoing: ByRank
) -> tuple[Backend, bool]:
    """Return what moves the arrays, and whether some were copied from a GPU, here or elsewhere.

    Messages of this rank may be replaced by copies in host memory.
    """
    places = [payload[_PREFIX.size - 1] for payload in payloads]
    if not any(places):  # nearly always
        return group.host, False
    backend, found = agreed(group, operation, places, list(outgoing.values()))
    outgoing.update(zip(outgoing, found, strict=True))
    return backend, backend is group.host and any([place & (COPIED | STAYS) for place in places])


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
    group: ProcessGroup, operation: str, payloads: list[bytes], allocate: Callable[[], Value]
) -> Value:
    """Return what ``allocate`` returns; when much moves, ranks check first that all could."""
    if sum(map(_size_of, payloads)) < CONFIRMED_BYTES:
        return allocate()
    return group.run_on_all_ranks(operation, allocate, "memory")


def _values(
    group: ProcessGroup, operation: str, copied: bool, received: list[Message], make: Make
) -> list[Any]:
    """Return what messages hold; raise on all ranks where one can't unpickle or use its GPU."""

    def unpack() -> list[Any]:
        found = messages.on_device(received, group.rank) if copied else received
        return [message.value() for message in found]

    if make is messages.of_objects:
        return group.run_on_all_ranks(operation, unpack, "unpickling")
    return group.run_on_all_ranks(operation, unpack, "copying to GPUs") if copied else unpack()


def _incoming(
    group: ProcessGroup,
    operation: str,
    payloads: list[bytes],
    outgoing: ByRank,
    headers: dict[int, bytes],
    backend: Backend,
) -> ByRank:
    """Return an empty message for each header, by rank; a copy of this rank's own."""

    def allocate() -> ByRank:
        return {
            rank: outgoing[rank].copy() if rank == group.rank else backend.allocate(header)
            for rank, header in headers.items()
        }

    return _with_memory(group, operation, payloads, allocate)


def _exchanged(
    group: ProcessGroup,
    operation: str,
    payloads: list[bytes],
    outgoing: ByRank,
    headers: dict[int, bytes],
    make: Make,
) -> list[Any]:
    """Send messages by rank; return the values of those that come, in the order of headers."""
    backend, copied = _agreed(group, operation, payloads, outgoing)
    incoming = _incoming(group, operation, payloads, outgoing, headers, backend)
    backend.exchange(_parts(outgoing), _parts(incoming))
    return _values(group, operation, copied, list(incoming.values()), make)


def _parts(by_rank: ByRank) -> Parts:
    return [(rank, array) for rank, message in by_rank.items() for array in message.arrays]
