"""The way of one chunk: packed, summed and unpacked on three streams, beside its neighbours.

A chunk has a slot, with a buffer, from when it is packed until it is unpacked. Each event is
recorded before the next chunk's work is enqueued on the stream, so that nothing waits for more than
it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import devices
from ..arithmetic import Chunk
from . import kernels
from .links import Links
from .tables import Tables

# While NCCL sums a chunk, the one before is unpacked and the one after packed.
SLOTS = 3


@dataclass(frozen=True)
class Call:
    """What one call needs; all of it must live until its work is over."""

    chunks: list[Chunk]
    inputs: list[Any]  # what is read, 1-D and contiguous
    flats: list[Any]  # what is written, likewise; the same arrays where that is the same memory
    tables: Tables
    buffers: list[Any]  # one for each slot
    first: int  # number of its first chunk, over all calls


class Place(NamedTuple):
    """Where a chunk is on the device: 1-D arrays, padded to equal shards if they are sharded."""

    summed: Any  # where it is summed, in the dtype of the sum
    own: Any  # the shard of that which this leader exchanges; not padded
    result: Any  # what all ranks get, in the wire dtype; often the same memory
    own_result: Any  # the same shard of that; the same array if it is the same memory
    in_place: bool  # the memory of its target, where it needs no unpacking


class Pipeline:
    """The streams, events and buffers of one rank's device."""

    def __init__(self) -> None:
        """Allocate what doesn't depend on chunks, on the current device (not collective)."""
        self.pack, self.sum, self.unpack = (devices.new_stream() for _ in range(3))
        events = [[devices.new_event() for _ in range(SLOTS)] for _ in range(3)]
        self._packed, self._summed, self._unpacked = events
        self._begun = devices.new_event()
        self._empty = devices.empty(0)

    def connect(
        self, links: Links, size: int, leaders: int, leader_index: int, sum_dtype: np.dtype | None
    ) -> None:
        """Use these links among ``size`` ranks (not collective).

        Each of a node's ``leaders`` exchanges a shard with other nodes, this rank that of
        ``leader_index``. What travels in 16 bits is summed in ``sum_dtype`` if that is given.
        """
        self._links, self._size = links, size
        self._several_nodes = links.several_nodes
        self._leaders, self._leader_index = leaders, leader_index
        self._sum_dtype = sum_dtype if size > 1 else None
        self.buffers = [self._empty] * SLOTS

    @property
    def streams(self) -> tuple[Any, ...]:
        """All that work is enqueued on."""
        return self.pack, self.sum, self.unpack

    def order_after_current(self) -> None:
        """Let what follows here wait for what is on the current stream."""
        self._begun.record(devices.current_stream())
        self.pack.wait_event(self._begun)

    def reserve(self, chunks: list[Chunk], flats: list[Any]) -> None:
        """Allocate what these chunks need."""
        lengths = [sum(self._lengths(c)) for c in chunks if self._in_place(c, flats) is None]
        nbytes = max(lengths, default=0)
        if self.buffers[0].nbytes < nbytes:  # the old ones live as long as the calls before
            self.buffers = [devices.empty(nbytes) for _ in self.buffers]

    def run(self, call: Call, number: int) -> None:
        """Enqueue a chunk's way to its targets."""
        chunk, links = call.chunks[number], self._links
        slot, place = self._place(call, number)
        if not place.in_place:
            self.pack.wait_event(self._unpacked[slot])
        index, _, _ = chunk.segments[0]
        if not place.in_place or self._size > 1 or call.inputs[index] is not call.flats[index]:
            table, count = call.tables.pack[number], len(chunk.segments)
            dtype = self._dtype_of_sum(chunk)
            with self.pack:
                kernels.launch("pack", dtype, table, count, place.summed, chunk.size, self._size)
        self._packed[slot].record(self.pack)
        self.sum.wait_event(self._packed[slot])
        if links.node is not None:
            if self._is_sharded(chunk):
                links.node.reduce_shards(place.summed, self._shards(chunk), self.sum)
            else:
                links.node.allreduce(place.summed[: chunk.size], self.sum)
        if links.inter is not None and place.own.size:
            links.inter.allreduce(place.own, self.sum)
        if place.own_result is not place.own and place.own.size:
            with self.sum:
                kernels.launch("cast", chunk.dtype, place.own, 1, place.own_result, place.own.size)
        if links.node is not None and self._is_sharded(chunk):
            links.node.gather_shards(place.result, self._shards(chunk), self.sum)
        # Before the next chunk's sum is enqueued, for which unpacking must not wait.
        self._summed[slot].record(self.sum)
        self.unpack.wait_event(self._summed[slot])
        if not place.in_place:
            table, count = call.tables.unpack[number], len(chunk.segments)
            with self.unpack:
                kernels.launch("unpack", chunk.dtype, table, count, place.result, chunk.size)
            self._unpacked[slot].record(self.unpack)

    def release(self) -> None:
        """Release the memory."""
        self.buffers = []

    def _dtype_of_sum(self, chunk: Chunk) -> np.dtype:
        return (chunk.dtype.itemsize == 2 and self._sum_dtype) or chunk.dtype

    def _is_sharded(self, chunk: Chunk) -> bool:
        """Whether some ranks of a node own shards, which they get, and then give to all."""
        return self._several_nodes or self._dtype_of_sum(chunk) != chunk.dtype

    def _shards(self, chunk: Chunk) -> int:
        if self._several_nodes or not self._is_sharded(chunk):
            return self._leaders
        return self._size

    def _lengths(self, chunk: Chunk) -> tuple[int, int]:
        """Return the bytes of the padded sum, and of the result where it isn't the same memory."""
        shards = self._shards(chunk)
        padded = -(-chunk.size // shards) * shards
        dtype = self._dtype_of_sum(chunk)
        result = 0 if dtype == chunk.dtype else padded * chunk.dtype.itemsize
        return padded * dtype.itemsize, result

    def _in_place(self, chunk: Chunk, flats: list[Any]) -> Any | None:
        """Return the chunk's target if it is summed there; None if it has to be packed."""
        index, start, stop = chunk.segments[0]
        is_cast = {flats[index].dtype, self._dtype_of_sum(chunk)} != {chunk.dtype}
        is_padded = self._is_sharded(chunk) and chunk.size % self._shards(chunk)
        if len(chunk.segments) > 1 or is_cast or is_padded:
            return None
        return flats[index][start:stop]

    def _place(self, call: Call, number: int) -> tuple[int, Place]:
        """Return a chunk's slot and its memory."""
        chunk = call.chunks[number]
        slot = (call.first + number) % len(call.buffers)
        shard = -(-chunk.size // self._shards(chunk))
        begin = min(self._leader_index * shard, chunk.size)
        own = slice(begin, min(begin + shard, chunk.size))
        target = self._in_place(chunk, call.flats)
        if target is not None:
            shard_of_target = target[own]
            return slot, Place(target, shard_of_target, target, shard_of_target, True)
        nbytes, of_result = self._lengths(chunk)
        storage = kernels.storage_dtype(self._dtype_of_sum(chunk))
        summed = call.buffers[slot][:nbytes].view(storage)
        own_sum = summed[own]
        if not of_result:
            return slot, Place(summed, own_sum, summed, own_sum, False)
        narrow = call.buffers[slot][nbytes : nbytes + of_result]
        result = narrow.view(kernels.storage_dtype(chunk.dtype))
        return slot, Place(summed, own_sum, result, result[own], False)
