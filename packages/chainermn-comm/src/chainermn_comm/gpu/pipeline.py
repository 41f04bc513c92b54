"""The way of chunks: packed, summed and unpacked on three streams, each beside its neighbours.

A chunk has a slot, with a buffer, from when it is packed until it is unpacked. Each event is
recorded before the next chunk's work is enqueued on the stream, so that nothing waits for more than
it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import devices
from ..arithmetic import Chunk
from . import kernels
from .communicators import Communicators
from .tables import TableCache, Tables

# While NCCL sums a chunk, the one before is unpacked and the one after packed.
SLOTS = 3


@dataclass(frozen=True)
class PreparedCall:
    """What one call needs; all of it must live until its work is over."""

    chunks: list[Chunk]
    inputs: list[Any]  # what is read, 1-D and contiguous
    flats: list[Any]  # what is written, likewise; the same arrays where that is the same memory
    tables: Tables
    buffers: list[Any]  # one for each slot


class ChunkPipeline:
    """The streams, events and buffers of one rank's device.

    Attributes:
        streams: all that work is enqueued on; the last one's is over last.
    """

    def __init__(self, communicators: Communicators, size: int, sum_dtype: np.dtype | None) -> None:
        """Allocate what doesn't depend on chunks, on the current device (not collective).

        The communicators connect ``size`` ranks. What travels in 16 bits is summed in ``sum_dtype``
        if that is given.
        """
        self._communicators, self._size = communicators, size
        self._sum_dtype = sum_dtype if size > 1 else None
        self.streams = self._pack, self._sum, self._unpack = [
            devices.new_stream() for _ in range(3)
        ]
        self._packed, self._summed, self._unpacked = [
            [devices.new_event() for _ in range(SLOTS)] for _ in range(3)
        ]
        self._begun = devices.new_event()
        self._buffers = [devices.empty(0)] * SLOTS
        self._slot = 0  # of the next chunk
        self._tables = TableCache()

    def prepare(self, chunks: list[Chunk], inputs: list[Any], flats: list[Any]) -> PreparedCall:
        """Allocate what these chunks need; write to no target."""
        packed = [chunk for chunk in chunks if self._target(chunk, flats) is None]
        nbytes = max([sum(self._lengths(chunk)) for chunk in packed], default=0)
        if self._buffers[0].nbytes < nbytes:  # the old ones live as long as the calls before
            self._buffers = [devices.empty(nbytes) for _ in self._buffers]
        self._wait_for_current_stream()
        tables = self._tables.tables_of(chunks, inputs, flats, self._pack)
        return PreparedCall(chunks, inputs, flats, tables, self._buffers)

    def run(self, call: PreparedCall) -> None:
        """Enqueue the way of all chunks to their targets (collective)."""
        self._wait_for_current_stream()
        for number in range(len(call.chunks)):
            self._run_chunk(call, number)

    def release(self) -> None:
        """Release the memory."""
        self._buffers = []
        self._tables.clear()

    def _wait_for_current_stream(self) -> None:
        self._begun.record(devices.current_stream())
        self._pack.wait_event(self._begun)

    def _run_chunk(self, call: PreparedCall, number: int) -> None:
        chunk, count = call.chunks[number], len(call.chunks[number].segments)
        slot, self._slot = self._slot, (self._slot + 1) % len(call.buffers)
        target, shards = self._target(chunk, call.flats), self._shards(chunk)
        summed, result = (target, target)
        if target is None:
            summed, result = self._memory(chunk, call.buffers[slot])
            self._pack.wait_event(self._unpacked[slot])
        index, _, _ = chunk.segments[0]
        if target is None or self._size > 1 or call.inputs[index] is not call.flats[index]:
            table, dtype = call.tables.pack[number], self._dtype_of_sum(chunk)
            with self._pack:
                kernels.launch("pack", dtype, table, count, summed, chunk.size, self._size)
        self._packed[slot].record(self._pack)
        self._sum.wait_event(self._packed[slot])
        if shards:
            self._sum_shards(chunk, shards, summed, result)
        elif self._communicators.intra is not None:
            self._communicators.intra.sum_in_place(summed, self._sum)
        # Before the next chunk's sum is enqueued, for which unpacking must not wait.
        self._summed[slot].record(self._sum)
        self._unpack.wait_event(self._summed[slot])
        if target is None:
            with self._unpack:
                table = call.tables.unpack[number]
                kernels.launch("unpack", chunk.dtype, table, count, result, chunk.size)
            self._unpacked[slot].record(self._unpack)

    def _sum_shards(self, chunk: Chunk, shards: int, summed: Any, result: Any) -> None:
        """Sum each shard on one of the node's ranks, then between nodes, and give it to all."""
        intra, inter = self._communicators.intra, self._communicators.inter
        length = -(-chunk.size // shards)
        start = min(self._communicators.index * length, chunk.size)
        own = slice(start, min(start + length, chunk.size))  # without what pads the last one
        if intra is not None:
            intra.reduce_shards(summed, shards, self._sum)
        if start < chunk.size:
            if inter is not None:
                inter.sum_in_place(summed[own], self._sum)
            if result is not summed:
                size = own.stop - start
                with self._sum:
                    kernels.launch("cast", chunk.dtype, summed[own], 1, result[own], size)
        if intra is not None:
            intra.gather_shards(result, shards, self._sum)

    def _dtype_of_sum(self, chunk: Chunk) -> np.dtype:
        return (chunk.dtype.itemsize == 2 and self._sum_dtype) or chunk.dtype

    def _shards(self, chunk: Chunk) -> int:
        """Return how many ranks of a node own equal shards; 0 where each sums the whole chunk."""
        if self._communicators.several_nodes:
            return self._communicators.leaders
        return self._size if self._dtype_of_sum(chunk) != chunk.dtype else 0

    def _target(self, chunk: Chunk, flats: list[Any]) -> Any | None:
        """Return the chunk's target if it is summed there; None if it has to be packed."""
        index, start, stop = chunk.segments[0]
        is_cast = {flats[index].dtype, self._dtype_of_sum(chunk)} != {chunk.dtype}
        is_padded = chunk.size % (self._shards(chunk) or 1) > 0
        is_packed = len(chunk.segments) > 1 or is_cast or is_padded
        return None if is_packed else flats[index][start:stop]

    def _lengths(self, chunk: Chunk) -> tuple[int, int]:
        """Return the bytes of the padded sum, and of the result where it isn't the same memory."""
        shards, dtype = self._shards(chunk) or 1, self._dtype_of_sum(chunk)
        padded = -(-chunk.size // shards) * shards
        result = 0 if dtype == chunk.dtype else padded * chunk.dtype.itemsize
        return padded * dtype.itemsize, result

    def _memory(self, chunk: Chunk, buffer: Any) -> tuple[Any, Any]:
        """Return the chunk's sum and its result in a slot's buffer: often the same memory.

        The first is in the dtype of the sum, the second in the wire dtype; both are padded to equal
        shards.
        """
        nbytes, of_result = self._lengths(chunk)
        summed = buffer[:nbytes].view(kernels.storage_dtype(self._dtype_of_sum(chunk)))
        if not of_result:
            return summed, summed
        result = buffer[nbytes : nbytes + of_result]
        return summed, result.view(kernels.storage_dtype(chunk.dtype))
