"""Means of gradients on one node, through memory that its ranks share.

Each rank packs a group of chunks into its slots, sums them over the node's ranks, and
unpacks the sums. These are stages: at tick t the stage with delay d works on group
t - d, and the node's ranks pass a barrier between two ticks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ..layout import Chunk, Operand, plan_chunks, shard_slice
from ..messaging import Algorithm, ProcessGroup
from ..numbers import accumulator, sum_rows
from .shared_window import NoSharedMemory, SharedWindow
from .sixteen_bits import with_exponents

# A chunk is summed in a core's cache. How many of them stay in it from packing to
# unpacking depends on the machine; a group has room for MOST_CHUNKS.
SHARED_CHUNK_BYTES = 256 << 10
MOST_CHUNKS = 8
# On a node of at most REDUNDANT_RANKS ranks, each rank sums the whole chunk itself: one
# barrier less. With more ranks, each sums one shard for all, since n times the bytes
# would move. See docs/decisions/shared-memory.md.
REDUNDANT_RANKS = 2
# Groups that have slots for terms at a time. Terms are read at the tick after they were
# written.
TERM_GROUPS = 2

# Does a step of the sum of a chunk, of an operand whose arrays are 1-D; chunks are
# numbered.
Work = Callable[[Operand, int, Chunk], None]


class Stage(NamedTuple):
    """A step of every chunk's sum."""

    delay: int  # ticks after the chunk has been packed
    work: Work


class SharedMemoryAllreduce(Algorithm):
    """Means on one node; :mod:`two_level` adds the exchange between nodes."""

    chunks_of_group = MOST_CHUNKS
    # Groups that have slots for sums at a time. Sums are read at the tick after they
    # were written.
    sum_groups = 2
    # Whether sums travel between nodes. Then they aren't divided before, and terms of
    # 16 bits are rounded only after the node's sum: their slots hold them in float32.
    sums_travel = False

    def __init__(
        self, group: ProcessGroup, chunk_bytes: int = SHARED_CHUNK_BYTES
    ) -> None:
        """Split the ranks by node, and allocate the node's window (collective).

        Where that can't be had, NoSharedMemory is raised on all ranks.
        """
        topology = group.topology
        node = topology.inter_rank(group.rank)
        self._ranks = topology.intra_size(group.rank)
        self._chunk_bytes = group.settings.chunk_bytes or chunk_bytes
        self._next_group = 0  # groups so far: slot numbers go on from call to call
        self._node = MPI.Intracomm(group.comm.Split(node, group.rank))
        # Whether ranks write sums for one another.
        self._shares_sums = self.sums_travel or self._ranks > REDUNDANT_RANKS
        group_bytes = self.chunks_of_group * self._chunk_bytes
        terms = TERM_GROUPS * group_bytes
        if self.sums_travel:
            terms *= 2
        sizes = [terms] * self._ranks
        if self._shares_sums:
            sizes[0] += self.sum_groups * group_bytes
        try:
            self._window = SharedWindow.open(group.comm, self._node, sizes)
        except NoSharedMemory:
            self._free()
            raise
        # Slots: of each rank, and of all.
        buffers = self._window.buffers
        count = TERM_GROUPS * self.chunks_of_group
        self._terms = [np.split(buffer[:terms], count) for buffer in buffers]
        count = self.sum_groups * self.chunks_of_group
        self._sums = np.split(buffers[0][terms:], count)

    def allreduce(self, operand: Operand) -> None:
        """Pass each group of chunks through all stages (collective).

        The node's ranks pass a barrier between two ticks. Slots are numbered from call
        to call: the ones that the first group is packed into were read before the last
        barrier of the call before.
        """
        operand = with_exponents(self, operand.flattened(), self.sums_travel)
        sizes = tuple([target.size for target in operand.targets])
        dtypes = tuple(operand.wire_dtypes)
        chunks = plan_chunks(sizes, dtypes, self._chunk_bytes)
        if not chunks:
            return
        step = self.chunks_of_group
        groups = [chunks[i : i + step] for i in range(0, len(chunks), step)]
        stages = self._stages()
        ticks = len(groups) + max([stage.delay for stage in stages])
        first = self._next_group
        with np.errstate(all="ignore"):
            for tick in range(ticks):
                if tick > 0:
                    self._window.barrier()
                for delay, work in stages:
                    index = tick - delay
                    if 0 <= index < len(groups):
                        number = (first + index) * step
                        for place, chunk in enumerate(groups[index]):
                            work(operand, number + place, chunk)
                self._end_tick()
        self._next_group = first + len(groups)

    def _end_tick(self) -> None:
        """Do what follows the stages of each tick."""

    def _stages(self) -> list[Stage]:
        """Return the stages, in the order of a tick."""
        if self._shares_sums:
            return [Stage(0, self._pack), Stage(1, self._sum), Stage(2, self._unpack)]
        return [Stage(0, self._pack), Stage(1, self._sum_whole_and_unpack)]

    def _pack(self, operand: Operand, number: int, chunk: Chunk) -> None:
        chunk.pack(operand, self._terms_of(number, chunk)[self._node.rank])

    def _sum_whole_and_unpack(
        self, operand: Operand, number: int, chunk: Chunk
    ) -> None:
        rows = self._terms_of(number, chunk)
        places = chunk.in_place(operand)
        if places is None:
            buffer = np.empty(chunk.size, chunk.dtype)
            sum_rows(rows, buffer, operand.divisor, operand.op)
            chunk.unpack(buffer, operand)
            return
        # This rank's own terms are read where the sums are written: their slot needs no
        # room in a core's cache.
        rows[self._node.rank], target = places
        sum_rows(rows, target, operand.divisor, operand.op)

    def _sum(self, operand: Operand, number: int, chunk: Chunk) -> None:
        """Write the sum of this rank's shard of the chunk."""
        divisor = operand.divisor
        if self.sums_travel:
            divisor = 1
        shard = shard_slice(chunk.size, self._ranks, self._node.rank)
        rows = [terms[shard] for terms in self._terms_of(number, chunk)]
        sum_rows(rows, self._sums_of(number, chunk)[shard], divisor, operand.op)

    def _unpack(self, operand: Operand, number: int, chunk: Chunk) -> None:
        chunk.unpack(self._sums_of(number, chunk), operand)

    def _terms_of(self, number: int, chunk: Chunk) -> list[np.ndarray]:
        """Return each rank's terms of the chunk."""
        dtype = chunk.dtype
        if self.sums_travel:
            dtype = accumulator(dtype)
        nbytes = chunk.size * dtype.itemsize
        slots = [slots[number % len(slots)] for slots in self._terms]
        return [slot[:nbytes].view(dtype) for slot in slots]

    def _sums_of(self, number: int, chunk: Chunk) -> np.ndarray:
        """Return the sums of the chunk, in the dtype in which they travel."""
        slot = self._sums[number % len(self._sums)]
        return slot[: chunk.nbytes].view(chunk.dtype)

    def close(self) -> None:
        self._terms = []  # no view of the window may outlive it
        self._sums = []
        self._window.close()
        self._free()

    def _free(self) -> None:
        self._node.Free()
