"""Collective operations on messages: a handshake that carries the headers, then the arrays.

Each function is collective. ``make`` builds the messages of values; what it raises is
raised on all ranks before any data move. Arrays on GPUs stay there if those of all
ranks can; else they pass through host memory. If the values are objects, or have passed
through host memory, ranks check at the end that all of them could unpickle what has
come, or put it on their GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..errors import raise_together
from ..numbers import integer_between, one_for_each
from . import messages
from .backend import Backend, Parts
from .memory import ON_GPU, ON_HOST, backend_for, memory_of
from .messages import Message
from .process_group import ProcessGroup

# The least bytes for which ranks check that all of them could allocate before any data
# move: beside such a transfer, a handshake costs nothing.
CONFIRMED_BYTES = 64 << 20
# The most bytes that travel in the handshake's payload: copying them costs less than a
# transfer.
SMALL_BYTES = 16 << 10
# The bytes of a rank's data, and the memory where they lie; begins each payload.
_HEAD = struct.Struct("<QB")

Make: TypeAlias = Callable[[Sequence[Any], int], list[Message]]
ByRank: TypeAlias = dict[int, Message]


def bcast(
    group: ProcessGroup, operation: str, value: Any, make: Make, root: int
) -> Any:
    """Return root's value on every rank."""
    call = _Call(group, operation, make)
    with group.call(operation):
        with raise_together(group.handshake, operation) as meeting:
            root = check_rank(group, root, "root")
            is_root = group.rank == root
            call.send({root: value} if is_root else {})
            meeting.signature = (("root", root),)
            meeting.payload = call.head + b"".join(call.headers())
            meeting.nbytes = call.nbytes
        descriptions = call.settle(meeting.payloads)
        headers = {} if is_root else {root: descriptions[root]}
        message = call.allocate(headers).get(root) or call.outgoing[root]
        call.backend.broadcast([(root, array) for array in message.arrays])
        if is_root and call.is_of_objects:
            call.values([])  # other ranks may fail to unpickle
            return value
        return call.values([message])[0]


def allgather(group: ProcessGroup, operation: str, value: Any, make: Make) -> list[Any]:
    """Return every rank's value on every rank."""
    call = _Call(group, operation, make)
    rank = group.rank
    with group.call(operation):
        with raise_together(group.handshake, operation) as meeting:
            call.send({rank: value})
            own = call.outgoing[rank]
            meeting.payload = call.head + own.header()
            if _is_small(call.nbytes, call.memory):
                meeting.payload = own.packed(meeting.payload)
            meeting.nbytes = call.nbytes
        descriptions = call.settle(meeting.payloads)
        headers = {}
        data = {}  # of the small messages
        for other, (nbytes, memory) in enumerate(call.heads):
            headers[other] = description = descriptions[other]
            if _is_small(nbytes, memory):
                end = len(description) - nbytes
                headers[other] = description[:end]
                data[other] = description[end:]
        incoming = call.allocate(headers)
        for other in data.keys() - {rank}:
            incoming[other].fill(data[other])
        large = {
            other: incoming[other] for other in range(group.size) if other not in data
        }
        if large:
            sent = {}
            if rank in large:
                # The copy was written just now, so that other ranks read it from a cache.
                sent = dict.fromkeys(range(group.size), incoming[rank])
            call.backend.allgather(_parts(sent), _parts(large))
        return call.values(incoming.values())


def gather(
    group: ProcessGroup, operation: str, value: Any, make: Make, root: int
) -> list[Any] | None:
    """Return every rank's value at root; None elsewhere."""
    call = _Call(group, operation, make)
    with group.call(operation):
        with raise_together(group.handshake, operation) as meeting:
            root = check_rank(group, root, "root")
            call.send({root: value})
            meeting.signature = (("root", root),)
            meeting.payload = call.head + call.outgoing[root].header()
            meeting.nbytes = call.nbytes
        descriptions = call.settle(meeting.payloads)
        if group.rank == root:
            return call.exchange(dict(enumerate(descriptions)))
        call.exchange({})
        return None


def scatter(
    group: ProcessGroup, operation: str, values: Any, make: Make, root: int
) -> Any:
    """Return root's i-th value on rank i."""
    call = _Call(group, operation, make)
    headers = None
    with group.call(operation):
        with raise_together(group.handshake, operation) as meeting:
            root = check_rank(group, root, "root")
            call.send(_by_rank(group, values) if group.rank == root else {})
            if group.rank == root:
                headers = call.headers()
            meeting.signature = (("root", root),)
            meeting.payload = call.head
            meeting.nbytes = call.nbytes
        call.settle(meeting.payloads)
        header = group.comm.scatter(headers, root)
        return call.exchange({root: header})[0]


def alltoall(group: ProcessGroup, operation: str, values: Any, make: Make) -> list[Any]:
    """Return each rank's i-th value on rank i."""
    call = _Call(group, operation, make)
    with group.call(operation):
        with raise_together(group.handshake, operation) as meeting:
            call.send(_by_rank(group, values))
            headers = call.headers()
            meeting.payload = call.head
            meeting.nbytes = call.nbytes
        call.settle(meeting.payloads)
        return call.exchange(dict(enumerate(group.comm.alltoall(headers))))


def check_rank(group: ProcessGroup, rank: Any, name: str) -> int:
    """Return one of the communicator's ranks as an int; raise ValueError if it is none."""
    return integer_between(rank, 0, group.size - 1, f"rank {group.rank}: {name}")


@dataclass
class _Call:
    """One rank's part of a collective call, before and after the handshake."""

    group: ProcessGroup
    operation: str
    make: Make
    # This rank's messages, by the rank that gets each, or that has it in a bcast.
    outgoing: ByRank = field(default_factory=dict)
    nbytes: int = 0  # of this rank's messages
    memory: int = 0  # where they lie
    # What follows is known after the handshake.
    heads: list[tuple[int, int]] = field(default_factory=list)  # bytes and memory
    backend: Backend = None  # type: ignore[assignment]  # moves the arrays
    is_copied: bool = False  # some rank's arrays travel from a GPU through host memory

    @property
    def is_of_objects(self) -> bool:
        return self.make is messages.of_objects

    @property
    def head(self) -> bytes:
        return _HEAD.pack(self.nbytes, self.memory)

    def send(self, values: dict[int, Any]) -> None:
        """Make the messages of this rank's values (not collective)."""
        made = self.make(list(values.values()), self.group.rank)
        self.outgoing = dict(zip(values, made, strict=True))
        self.nbytes = sum([message.nbytes for message in made])
        is_on_host = self.nbytes > 0 and not any([message.on_gpu for message in made])
        if is_on_host or self.is_of_objects:  # nearly always
            self.memory = ON_HOST
        else:
            arrays = [array for message in made for array in message.arrays]
            self.memory = memory_of(self.group, arrays)

    def headers(self) -> list[bytes]:
        return [message.header() for message in self.outgoing.values()]

    def settle(self, payloads: list[bytes]) -> list[bytes]:
        """Choose the backend, and return what follows the heads in the payloads (collective)."""
        group = self.group
        self.heads = [_HEAD.unpack_from(payload) for payload in payloads]
        memory = [each for _, each in self.heads]
        self.backend = backend_for(group, self.operation, memory)
        is_on_gpus = any([each & ON_GPU for each in memory])
        if is_on_gpus and self.backend is group.host:
            self.is_copied = True
            with group.together(f"{self.operation}, copying to host memory"):
                found = messages.on_host(list(self.outgoing.values()), group.rank)
            self.outgoing = dict(zip(self.outgoing, found, strict=True))
        return [payload[_HEAD.size :] for payload in payloads]

    def allocate(self, headers: dict[int, bytes]) -> ByRank:
        """Return an empty message for each header, by rank; a copy of this rank's own.

        If much moves, ranks check first that all could allocate (collective).
        """
        if sum([nbytes for nbytes, _ in self.heads]) < CONFIRMED_BYTES:
            return self._allocate(headers)
        with self.group.together(f"{self.operation}, memory"):
            return self._allocate(headers)

    def _allocate(self, headers: dict[int, bytes]) -> ByRank:
        found = {rank: self.backend.allocate(it) for rank, it in headers.items()}
        own = found.get(self.group.rank)
        if own is not None:
            self.outgoing[self.group.rank].copy_to(own)
        return found

    def exchange(self, headers: dict[int, bytes]) -> list[Any]:
        """Send messages, and return the values of those with these headers (collective)."""
        incoming = self.allocate(headers)
        self.backend.exchange(_parts(self.outgoing), _parts(incoming))
        return self.values(incoming.values())

    def values(self, received: Iterable[Message]) -> list[Any]:
        """Return what messages hold (collective).

        All ranks raise if one of them can't unpickle an object, or use its GPU.
        """
        if self.is_copied:
            with self.group.together(f"{self.operation}, copying to GPUs"):
                moved = messages.on_device(list(received), self.group.rank)
                return [message.value() for message in moved]
        if self.is_of_objects:
            with self.group.together(f"{self.operation}, unpickling"):
                return [message.value() for message in received]
        return [message.value() for message in received]


def _by_rank(group: ProcessGroup, values: Any) -> dict[int, Any]:
    return dict(enumerate(one_for_each(values, group.rank, group.size)))


def _is_small(nbytes: int, memory: int) -> bool:
    """Return whether a message's data travel in the handshake's payload."""
    return nbytes <= SMALL_BYTES and not memory & ON_GPU


def _parts(by_rank: ByRank) -> Parts:
    return [
        (rank, array) for rank, message in by_rank.items() for array in message.arrays
    ]
