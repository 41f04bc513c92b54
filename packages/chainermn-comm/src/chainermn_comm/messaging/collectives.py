"""Collective operations on messages: a handshake that carries the headers, then the arrays.

Each function is collective. ``make`` builds the messages of values; if it raises, all
ranks raise before any data move. Arrays on GPUs stay there if possible on all ranks;
otherwise they pass through host memory. If values are objects, or have passed through
host memory, ranks check at the end that all could unpickle them, or put them on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import raise_together
from ..numbers import integer_between, one_for_each
from . import messages
from .backend import Backend, Parts
from .backend_choice import ON_GPU, choose_backend, memory_of
from .messages import Message
from .process_group import ProcessGroup

# The most bytes of data that travel with their header, in the handshake's payload:
# copying them costs less than a transfer.
SMALL_BYTES = 16 << 10

Make: TypeAlias = Callable[[Sequence[Any], int], list[Message]]
ByRank: TypeAlias = dict[int, Message]


def bcast(
    group: ProcessGroup, operation: str, value: Any, make: Make, root: int
) -> Any:
    """Return root's value on every rank."""

    def values() -> list[Any]:
        return [value] if group.rank == root else []

    with group.call(operation):
        move = _meet(group, operation, make, values, [root])
        if group.rank != root:
            received = move.backend.allocate(move.frames[root])
            move.backend.broadcast(_parts({root: received}))
            return move.finish([received])[0]
        move.backend.broadcast(_parts({root: move.outgoing[0]}))
        move.finish([])  # other ranks may fail to unpickle, or to use their GPU
    if move.is_of_objects:
        return value
    return move.made[0].value()


def allgather(group: ProcessGroup, operation: str, value: Any, make: Make) -> list[Any]:
    """Return every rank's value on every rank."""
    rank = group.rank
    with group.call(operation):
        move = _meet(group, operation, make, lambda: [value], inline_bytes=SMALL_BYTES)
        frames = move.frames
        incoming = move.incoming({rank: move.outgoing[0]}, dict(enumerate(frames)))
        large = {}
        for other, message in incoming.items():
            if not _is_inline(message.nbytes, move.memory[other], SMALL_BYTES):
                large[other] = message
            elif other != rank:
                message.fill(frames[other])
        if large:
            sent = {}
            if rank in large:
                # The copy has just been written, so other ranks read it from a cache.
                sent = dict.fromkeys(range(group.size), incoming[rank])
            move.backend.allgather(_parts(sent), _parts(large))
        return move.finish(incoming.values())


def gather(
    group: ProcessGroup, operation: str, value: Any, make: Make, root: int
) -> list[Any] | None:
    """Return every rank's value at root; None elsewhere."""
    with group.call(operation):
        move = _meet(group, operation, make, lambda: [value], [root])
        outgoing = {root: move.outgoing[0]}
        if group.rank == root:
            return move.exchange(outgoing, dict(enumerate(move.frames)))
        move.exchange(outgoing, {})
        return None


def scatter(
    group: ProcessGroup, operation: str, values: Any, make: Make, root: int
) -> Any:
    """Return root's i-th value on rank i."""

    def row() -> list[Any]:
        if group.rank != root:
            return []
        return one_for_each(values, group.rank, group.size)

    with group.call(operation):
        move = _meet(group, operation, make, row, [root])
        frame = group.comm.scatter(move.own_frames or None, root)
        return move.exchange(dict(enumerate(move.outgoing)), {root: frame})[0]


def alltoall(group: ProcessGroup, operation: str, values: Any, make: Make) -> list[Any]:
    """Return each rank's i-th value on rank i."""

    def row() -> list[Any]:
        return one_for_each(values, group.rank, group.size)

    with group.call(operation):
        move = _meet(group, operation, make, row)
        frames = group.comm.alltoall(move.own_frames)
        return move.exchange(dict(enumerate(move.outgoing)), dict(enumerate(frames)))


@dataclass
class Move:
    """A collective call that ranks have begun: what this rank sends, and how data move.

    A frame is a message's header, which data may follow.
    """

    group: ProcessGroup
    operation: str
    is_of_objects: bool  # values are pickled
    made: list[Message]  # messages of this rank's values
    outgoing: list[Message]  # the same messages, for the backend
    own_frames: list[bytes]  # the frames of these messages
    frames: list[bytes]  # by rank: the frame of the rank's message, if any
    memory: list[int]  # by rank, see `backend_choice`
    backend: Backend
    is_copied: bool  # whether some rank's arrays travel from a GPU through host memory

    def incoming(self, outgoing: ByRank, frames: dict[int, bytes]) -> ByRank:
        """Return a message to be received for each frame, by rank; this rank's own is complete."""
        incoming = {}
        for rank, frame in frames.items():
            incoming[rank] = self.backend.allocate(frame)
        own = self.group.rank
        if own in incoming:
            outgoing[own].copy_to(incoming[own])
        return incoming

    def exchange(self, outgoing: ByRank, frames: dict[int, bytes]) -> list[Any]:
        """Send messages, and return the values that are received by these frames (collective)."""
        incoming = self.incoming(outgoing, frames)
        self.backend.exchange(_parts(outgoing), _parts(incoming))
        return self.finish(incoming.values())

    def finish(self, received: Iterable[Message]) -> list[Any]:
        """End the call: return the values of the messages (collective).

        All ranks raise if one of them can't unpickle an object, or use its GPU.
        """
        if self.is_copied:
            last = "copying to GPUs"
        elif self.is_of_objects:
            last = "unpickling"
        else:
            return [message.value() for message in received]
        with self.group.together(f"{self.operation}, {last}"):
            found = messages.on_device(list(received), self.group.rank)
            return [message.value() for message in found]


def _meet(
    group: ProcessGroup,
    operation: str,
    make: Make,
    values: Callable[[], Sequence[Any]],
    roots: Sequence[Any] = (),
    inline_bytes: int = -1,
) -> Move:
    """Make messages of this rank's values, and compare the calls (collective).

    ``roots`` has the root, if the call has one; it may be anything, such as None. Data of
    at most ``inline_bytes`` follow their header.
    """
    with raise_together(group.handshake, operation) as call:
        for root in roots:
            what = f"rank {group.rank}: root"
            call.signature = (("root", integer_between(root, 0, group.size - 1, what)),)
        made = make(values(), group.rank)
        memory = memory_of(group, [it for message in made for it in message.arrays])
        frames = []
        for message in made:
            frame = message.header()
            if _is_inline(message.nbytes, memory, inline_bytes):
                frame += message.data()
            frames.append(frame)
        call.payload = bytes([memory])
        if len(frames) == 1:
            call.payload += frames[0]
        call.nbytes = sum([message.nbytes for message in made])
    memory_of_all = [payload[0] for payload in call.payloads]
    backend, is_copied = choose_backend(group, operation, memory_of_all)
    outgoing = made
    if is_copied:
        with group.together(f"{operation}, copying to host memory"):
            outgoing = messages.on_host(made, group.rank)
    return Move(
        group=group,
        operation=operation,
        is_of_objects=make is messages.of_objects,
        made=made,
        outgoing=outgoing,
        own_frames=frames,
        frames=[payload[1:] for payload in call.payloads],
        memory=memory_of_all,
        backend=backend,
        is_copied=is_copied,
    )


def _is_inline(nbytes: int, memory: int, inline_bytes: int) -> bool:
    return nbytes <= inline_bytes and not memory & ON_GPU


def _parts(by_rank: ByRank) -> Parts:
    return [
        (rank, array) for rank, message in by_rank.items() for array in message.arrays
    ]
