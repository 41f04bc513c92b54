"""Collective operations on messages: a handshake that carries the headers, then the arrays.

Each function is collective. ``make`` builds the messages of values; what it raises is
raised on all ranks before any data move. Arrays on GPUs stay there if those of all
ranks can; else they pass through host memory. If the values are objects, or have passed
through host memory, ranks check at the end that all of them could unpickle what has
come, or put it on their GPU.
"""

from __future__ import annotations

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

# The least bytes that one rank's data may take on all ranks for which these check that
# all could allocate before any data move: beside such a transfer, a handshake costs
# nothing.
CONFIRMED_BYTES = 64 << 20
# The most bytes that travel in the handshake's payload: copying them costs less than a
# transfer.
SMALL_BYTES = 16 << 10
# Flags of a rank's arrays, beside those of `memory.py`; they begin each payload.
_IS_INLINE = 8  # the data follow the header in the payload
_IS_LARGE = 16  # ranks check that all of them can allocate

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
            sent = {}
            if is_root:
                sent[root] = value
            frames = call.send(sent)
            meeting.signature = (("root", root),)
            meeting.payload = b"".join([call.head, *frames])
            meeting.nbytes = call.nbytes
        own = dict(call.outgoing)
        frames = call.settle(meeting.payloads)
        if not is_root:
            incoming = call.allocate({root: frames[root]})
            call.backend.broadcast(_parts(incoming))
            return call.values(incoming.values())[0]
        call.allocate({})  # other ranks may lack the memory
        call.backend.broadcast(_parts(call.outgoing))
        call.values([])  # other ranks may fail to unpickle, or to use their GPU
        return value if call.is_of_objects else own[root].value()


def allgather(group: ProcessGroup, operation: str, value: Any, make: Make) -> list[Any]:
    """Return every rank's value on every rank."""
    call = _Call(group, operation, make)
    rank = group.rank
    with group.call(operation):
        with raise_together(group.handshake, operation) as meeting:
            (frame,) = call.send({rank: value}, inline_bytes=SMALL_BYTES)
            meeting.payload = call.head + frame
            meeting.nbytes = call.nbytes
        frames = call.settle(meeting.payloads)
        incoming = call.allocate(dict(enumerate(frames)))
        large = {}
        for other, message in incoming.items():
            if not call.flags[other] & _IS_INLINE:
                large[other] = message
            elif other != rank:
                message.fill(frames[other])
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
            (frame,) = call.send({root: value})
            meeting.signature = (("root", root),)
            meeting.payload = call.head + frame
            meeting.nbytes = call.nbytes
        frames = call.settle(meeting.payloads)
        if group.rank == root:
            return call.exchange(dict(enumerate(frames)))
        call.exchange({})
        return None


def scatter(
    group: ProcessGroup, operation: str, values: Any, make: Make, root: int
) -> Any:
    """Return root's i-th value on rank i."""
    call = _Call(group, operation, make)
    with group.call(operation):
        with raise_together(group.handshake, operation) as meeting:
            root = check_rank(group, root, "root")
            sent = {}
            if group.rank == root:
                sent = _by_rank(group, values)
            frames = call.send(sent)
            meeting.signature = (("root", root),)
            meeting.payload = call.head
            meeting.nbytes = call.nbytes
        call.settle(meeting.payloads)
        frame = group.comm.scatter(frames or None, root)
        return call.exchange({root: frame})[0]


def alltoall(group: ProcessGroup, operation: str, values: Any, make: Make) -> list[Any]:
    """Return each rank's i-th value on rank i."""
    call = _Call(group, operation, make)
    with group.call(operation):
        with raise_together(group.handshake, operation) as meeting:
            frames = call.send(_by_rank(group, values))
            meeting.payload = call.head
            meeting.nbytes = call.nbytes
        call.settle(meeting.payloads)
        return call.exchange(dict(enumerate(group.comm.alltoall(frames))))


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
    head: bytes = b""  # this rank's flags
    # What follows is known after the handshake.
    flags: Sequence[int] = ()  # by rank
    backend: Backend = None  # type: ignore[assignment]  # moves the arrays
    is_copied: bool = False  # some rank's arrays travel from a GPU through host memory

    @property
    def is_of_objects(self) -> bool:
        return self.make is messages.of_objects

    def send(self, values: dict[int, Any], inline_bytes: int = -1) -> list[bytes]:
        """Make the messages of this rank's values, and return their frames (not collective).

        A frame is a message's header, followed by its data if these have no more than
        ``inline_bytes``.
        """
        group = self.group
        made = self.make(list(values.values()), group.rank)
        self.outgoing = dict(zip(values, made, strict=True))
        self.nbytes = sum([message.nbytes for message in made])
        is_on_host = self.nbytes > 0 and not any([message.on_gpu for message in made])
        if is_on_host or self.is_of_objects:  # nearly always
            flags = ON_HOST
        else:
            flags = memory_of(group, [it for message in made for it in message.arrays])
        is_inline = self.nbytes <= inline_bytes and not flags & ON_GPU
        if self.nbytes * group.size >= CONFIRMED_BYTES:
            flags |= _IS_LARGE
        if is_inline:
            flags |= _IS_INLINE
        self.head = bytes([flags])
        if is_inline:
            return [message.header() + message.data() for message in made]
        return [message.header() for message in made]

    def settle(self, payloads: list[bytes]) -> list[bytes]:
        """Choose the backend, and return what follows the flags in the payloads (collective)."""
        group = self.group
        flags = [payload[0] for payload in payloads]
        self.flags = flags
        self.backend = backend_for(group, self.operation, flags)
        is_on_gpus = any([each & ON_GPU for each in flags])
        if is_on_gpus and self.backend is group.host:
            self.is_copied = True
            own = list(self.outgoing.values())
            with group.together(f"{self.operation}, copying to host memory"):
                copied = messages.on_host(own, group.rank)
            self.outgoing = dict(zip(self.outgoing, copied, strict=True))
        return [payload[1:] for payload in payloads]

    def allocate(self, frames: dict[int, bytes]) -> ByRank:
        """Return an empty message for each frame, by rank; a copy of this rank's own.

        If much moves, ranks check first that all could allocate (collective).
        """
        if not any([each & _IS_LARGE for each in self.flags]):
            return self._allocate(frames)
        with self.group.together(f"{self.operation}, memory"):
            return self._allocate(frames)

    def _allocate(self, frames: dict[int, bytes]) -> ByRank:
        found = {}
        for rank, frame in frames.items():
            found[rank] = self.backend.allocate(frame)
        own = self.group.rank
        if own in found:
            self.outgoing[own].copy_to(found[own])
        return found

    def exchange(self, frames: dict[int, bytes]) -> list[Any]:
        """Send messages, and return the values of those with these frames (collective)."""
        incoming = self.allocate(frames)
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


def _parts(by_rank: ByRank) -> Parts:
    return [
        (rank, array) for rank, message in by_rank.items() for array in message.arrays
    ]
