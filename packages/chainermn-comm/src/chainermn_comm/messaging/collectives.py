"""Collective operations on messages: a handshake that carries the headers, then the arrays.

Each function is collective. ``make`` builds the messages of values; what it raises is
raised on all ranks before any data move. Arrays on GPUs stay there where those of all
ranks can; else they pass through host memory. Of objects, and of what passed there,
ranks check at the end that all of them could unpickle what has come, or put it on their
GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

from .. import devices
from ..errors import raise_together
from ..numbers import integer_between, one_for_each
from . import messages
from .backend import Backend, Parts, Takes
from .messages import Message
from .process_group import ProcessGroup

# The least bytes for which ranks check that all of them could allocate before any data
# move: beside such a transfer, a handshake costs nothing.
CONFIRMED_BYTES = 64 << 20
# The most bytes that travel in the handshake's payload: copying them costs less than a
# transfer.
SMALL_BYTES = 16 << 10
_PREFIX = struct.Struct("<QB")  # bytes of a rank's data, and where they lie
# Some came from a GPU, and are in host memory now; they are still there; they could
# stay there.
COPIED, STAYS, CAN_STAY = 1, 2, 4

_NO_ROOT: Any = object()  # of an operation without a root

Make: TypeAlias = Callable[[Sequence[Any], int, Takes | None], list[Message]]
ByRank: TypeAlias = dict[int, Message]
Value = TypeVar("Value")


def bcast(
    group: ProcessGroup, operation: str, value: Any, make: Make, root: int
) -> Any:
    """Return root's value on every rank."""
    with group.call(operation):
        call = _Call(
            group,
            operation,
            make,
            lambda root: {root: value} if group.rank == root else {},
            Message.header,
            root,
        )
        own, header = call.outgoing.get(call.root), call.header(call.root)
        incoming = call.with_memory(lambda: own or call.backend.allocate(header))
        call.backend.broadcast([(call.root, array) for array in incoming.arrays])
        if own is not None and make is messages.of_objects:
            call.values([])
            return value
        return call.values([incoming])[0]


def allgather(group: ProcessGroup, operation: str, value: Any, make: Make) -> list[Any]:
    """Return every rank's value on every rank."""
    with group.call(operation):
        call = _Call(
            group,
            operation,
            make,
            lambda _: {group.rank: value},
            _header_and_small_data,
        )
        # Where the data of a small message begin in its payload.
        starts = {}
        for rank, payload in enumerate(call.payloads):
            nbytes, place = _PREFIX.unpack_from(payload)
            if nbytes <= SMALL_BYTES and not place & STAYS:
                starts[rank] = len(payload) - nbytes
        incoming = call.allocate(
            {rank: call.header(rank, starts.get(rank)) for rank in range(group.size)}
        )
        for rank in starts.keys() - {group.rank}:
            incoming[rank].fill(call.payloads[rank][starts[rank] :])
        large = sorted(incoming.keys() - starts.keys())
        if large:
            # Written just now, so that others read it from a cache.
            own = incoming[group.rank]
            sent = dict.fromkeys(range(group.size), own) if group.rank in large else {}
            call.backend.allgather(
                _parts(sent), _parts({rank: incoming[rank] for rank in large})
            )
        return call.values(incoming.values())


def gather(
    group: ProcessGroup, operation: str, value: Any, make: Make, root: int
) -> list[Any] | None:
    """Return every rank's value at root; None elsewhere."""
    with group.call(operation):
        call = _Call(
            group, operation, make, lambda root: {root: value}, Message.header, root
        )
        is_root = group.rank == call.root
        values = call.exchange(
            {rank: call.header(rank) for rank in range(group.size * is_root)}
        )
        return values if is_root else None


def scatter(
    group: ProcessGroup, operation: str, values: Any, make: Make, root: int
) -> Any:
    """Return root's i-th value on rank i."""
    with group.call(operation):
        call = _Call(
            group,
            operation,
            make,
            lambda root: _by_rank(group, values) if group.rank == root else {},
            root=root,
        )
        header = group.comm.scatter(call.own_headers or None, call.root)
        return call.exchange({call.root: header})[0]


def alltoall(group: ProcessGroup, operation: str, values: Any, make: Make) -> list[Any]:
    """Return each rank's i-th value on rank i."""
    with group.call(operation):
        call = _Call(group, operation, make, lambda _: _by_rank(group, values))
        return call.exchange(dict(enumerate(group.comm.alltoall(call.own_headers))))


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
    if not any([place & STAYS for place in places]):
        return group.host, outgoing
    if all([place & CAN_STAY for place in places]) and group.device.connect():
        return group.device, outgoing
    with raise_together(group.handshake, f"{operation}, copying to host memory"):
        copied = messages.on_host(outgoing, group.rank)
    return group.host, copied


def _by_rank(group: ProcessGroup, values: Any) -> dict[int, Any]:
    return dict(enumerate(one_for_each(values, group.rank, group.size)))


class _Call:
    """One collective call, on whose handshake all ranks have agreed."""

    def __init__(
        self,
        group: ProcessGroup,
        operation: str,
        make: Make,
        values_of: Callable[[Any], dict[int, Any]],
        describe: Callable[[Message], bytes] | None = None,
        root: Any = _NO_ROOT,
    ) -> None:
        """Agree on the call (collective).

        ``values_of`` the checked root gives what this rank sends, by rank. Where that
        is one value, the handshake can carry what ``describe`` makes of its message.
        """
        self.group, self.operation, self.make = group, operation, make
        takes = None if make is messages.of_objects else group.device.takes
        with raise_together(group.handshake, operation) as agreement:
            self.root = root if root is _NO_ROOT else check_rank(group, root, "root")
            if root is not _NO_ROOT:
                agreement.signature = (("root", self.root),)
            by_rank = values_of(self.root)
            made = make(list(by_rank.values()), group.rank, takes)
            nbytes = sum([message.nbytes for message in made])
            payload = _PREFIX.pack(nbytes, places_of(made, takes))
            if describe is None:  # of this rank's messages, by the rank that gets them
                self.own_headers = [message.header() for message in made]
            elif made:
                payload += describe(made[0])
            agreement.payload = payload
            agreement.nbytes = nbytes
        # Of each rank: a prefix, and how it described its messages.
        self.payloads = agreement.payloads
        self.backend: Backend = group.host  # what moves the arrays
        self.copied = False  # whether some were copied from a GPU, here or elsewhere
        places = [each[_PREFIX.size - 1] for each in self.payloads]
        if any(places):  # hardly ever
            self.backend, made = agreed(group, operation, places, made)
            was_on_gpu = any([place & (COPIED | STAYS) for place in places])
            self.copied = was_on_gpu and self.backend is group.host
        # Each by the rank that gets it, or that has it in a bcast.
        self.outgoing: ByRank = dict(zip(by_rank, made, strict=True))

    def header(self, rank: int, end: int | None = None) -> bytes:
        """Return the header of the rank's message, which its payload holds up to ``end``."""
        return self.payloads[rank][_PREFIX.size : end]

    def with_memory(self, allocate: Callable[[], Value]) -> Value:
        """Return what ``allocate`` returns; when much moves, ranks check first that all could."""
        if (
            sum([_PREFIX.unpack_from(each)[0] for each in self.payloads])
            < CONFIRMED_BYTES
        ):
            return allocate()
        what = f"{self.operation}, memory"
        with (
            raise_together(self.group.handshake, what),
            devices.translated_errors(f"rank {self.group.rank}: {what}"),
        ):
            return allocate()

    def allocate(self, headers: dict[int, bytes]) -> ByRank:
        """Return an empty message for each header, by rank; a copy of this rank's own."""
        allocate, own = self.backend.allocate, self.group.rank
        found = self.with_memory(
            lambda: {rank: allocate(it) for rank, it in headers.items()}
        )
        if own in found:
            self.outgoing[own].copy_to(found[own])
        return found

    def exchange(self, headers: dict[int, bytes]) -> list[Any]:
        """Send messages by rank; return the values of those that come, in the order of headers."""
        incoming = self.allocate(headers)
        self.backend.exchange(_parts(self.outgoing), _parts(incoming))
        return self.values(incoming.values())

    def values(self, received: Iterable[Message]) -> list[Any]:
        """Return what messages hold; raise on all ranks where one can't unpickle or use its GPU."""

        def unpack() -> list[Any]:
            found = (
                messages.on_device(list(received), self.group.rank)
                if self.copied
                else received
            )
            return [message.value() for message in found]

        if self.make is messages.of_objects:
            part = "unpickling"
        elif self.copied:
            part = "copying to GPUs"
        else:
            return unpack()
        with raise_together(self.group.handshake, f"{self.operation}, {part}"):
            return unpack()


def _header_and_small_data(message: Message) -> bytes:
    header = message.header()
    return (
        header
        if message.nbytes > SMALL_BYTES or message.stays
        else message.packed(header)
    )


def _parts(by_rank: ByRank) -> Parts:
    return [
        (rank, array) for rank, message in by_rank.items() for array in message.arrays
    ]
