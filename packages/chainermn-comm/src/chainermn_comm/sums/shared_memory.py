"""Means of gradients on one node, through memory that its ranks share.

Each rank packs a group of chunks into its slots, sums them over the node's ranks, and
unpacks the sums. These are stages: at tick t the stage with delay d works on group
t - d, and the node's ranks pass a barrier between two ticks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
# would move; but every rank still sums arrays of at most REDUNDANT_BYTES over all ranks.
# See docs/decisions/sums.md.
REDUNDANT_RANKS = 2
REDUNDANT_BYTES = 512 << 10
# The number of groups that have slots for terms at the same time. Terms are read one
# tick after they were written.
TERM_GROUPS = 2

# Does a step of the sum of a chunk, of an operand whose arrays are 1-D; chunks are
# numbered.
Work = Callable[[Operand, int, Chunk], None]


class Stage(NamedTuple):
    """A step of every chunk's sum."""

    delay: int  # ticks after the chunk has been packed
    work: Work


class Plan(NamedTuple):
    """How arrays of given sizes and dtypes are divided."""

    groups: list[list[Chunk]]
    nbytes: int  # of each rank's arrays as they travel


class SharedMemoryAllreduce(Algorithm):
    """Means on one node; :mod:`two_level` adds the exchange between nodes."""

    chunks_of_group = MOST_CHUNKS
    # The number of groups that have slots for sums at the same time. Sums are read one
    # tick after they were written.
    sum_groups = 2
    # Whether sums travel between nodes. Then they aren't divided before, and terms of
    # 16 bits are rounded only after the node's sum: their slots hold them in float32.
    sums_travel = False

    def __init__(
        self, group: ProcessGroup, chunk_bytes: int = SHARED_CHUNK_BYTES
    ) -> None:
        """Split the ranks by node, and allocate the node's window (collective).

        If a node can have no window, all ranks raise NoSharedMemory.
        """
        topology = group.topology
        node = topology.inter_rank(group.rank)
        self._ranks = topology.intra_size(group.rank)
        self._chunk_bytes = group.settings.chunk_bytes or chunk_bytes
        # Number of groups so far; slot numbers go on from call to call.
        self._next_group = 0
        self._begun_group = -1  # the last group that was packed before a call
        # The last sizes and dtypes, and the plan for them: most calls repeat it.
        self._planned: tuple[Sequence[int], Sequence[np.dtype]] = ((), ())
        self._plan = Plan([], 0)
        # The terms of each rank, by slot, size and dtype of the last plan.
        self._rows: dict[tuple[int, int, np.dtype], list[np.ndarray]] = {}
        self._node = MPI.Intracomm(group.comm.Split(node, group.rank))
        self._intra_rank = self._node.rank
        # Whether ranks write sums for each other.
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
        # The slots of each rank, and of all ranks.
        buffers = self._window.buffers
        count = TERM_GROUPS * self.chunks_of_group
        self._terms = [np.split(buffer[:terms], count) for buffer in buffers]
        count = self.sum_groups * self.chunks_of_group
        self._sums = np.split(buffers[0][terms:], count)
        # For one chunk's sums.
        self._scratch = np.empty(self._chunk_bytes, np.uint8)

    def allreduce(self, operand: Operand) -> None:
        """Pass each group of chunks through all stages (collective).

        The node's ranks pass a barrier between two ticks. Slot numbers go on from call to
        call: the first group's slots were read before the last barrier of the call before.
        """
        operand = with_exponents(self, operand.flattened(), self.sums_travel)
        self._pass_through_stages(operand, self._plan_for(operand))

    def begin(self, operand: Operand) -> Callable[[], None] | None:
        first = self._next_group
        # The slots may have the terms of another call that has begun.
        if self.sums_travel or self._begun_group == first:
            return None
        flat = operand.flattened()
        plan = self._plan_for(flat)
        if not plan.groups or not flat.keeps_dtypes():
            return None
        self._begun_group = first
        self._do(self._pack, flat, plan.groups[0], first)
        self._window.sync()

        def finish() -> None:
            self._window.sync()
            if self._next_group == first:
                self._pass_through_stages(flat, plan, 1)
            else:  # another call has used the slots since
                self.allreduce(operand)

        return finish

    def _plan_for(self, operand: Operand) -> Plan:
        """Return the plan for the operand's sizes and dtypes."""
        sizes = [target.size for target in operand.targets]
        dtypes = list(operand.wire_dtypes)
        if self._planned != (sizes, dtypes):
            chunks = plan_chunks(tuple(sizes), tuple(dtypes), self._chunk_bytes)
            step = self.chunks_of_group
            groups = [chunks[i : i + step] for i in range(0, len(chunks), step)]
            self._plan = Plan(groups, sum([chunk.nbytes for chunk in chunks]))
            self._planned = (sizes, dtypes)
            self._rows = {}
        return self._plan

    def _pass_through_stages(
        self, operand: Operand, plan: Plan, first_tick: int = 0
    ) -> None:
        """Do all stages of all groups, from a tick on (collective)."""
        groups = plan.groups
        if not groups:
            return
        stages = self._stages(plan.nbytes)
        ticks = len(groups) + stages[-1].delay
        first = self._next_group
        with np.errstate(all="ignore"):
            for tick in range(first_tick, ticks):
                if tick > first_tick:
                    self._window.barrier()
                for delay, work in stages:
                    index = tick - delay
                    if 0 <= index < len(groups):
                        self._do(work, operand, groups[index], first + index)
                self._end_tick()
        self._next_group = first + len(groups)

    def _do(
        self, work: Work, operand: Operand, chunks: list[Chunk], number: int
    ) -> None:
        """Do a stage's work on the chunks of a group."""
        number *= self.chunks_of_group
        for place, chunk in enumerate(chunks):
            work(operand, number + place, chunk)

    def _end_tick(self) -> None:
        """Do the work that follows the stages of each tick."""

    def _stages(self, nbytes: int) -> list[Stage]:
        """Return the stages for ``nbytes`` bytes per rank, in the order of a tick.

        The last stage has the longest delay.
        """
        if self._shares_sums and self._ranks * nbytes > REDUNDANT_BYTES:
            return [Stage(0, self._pack), Stage(1, self._sum), Stage(2, self._unpack)]
        return [Stage(0, self._pack), Stage(1, self._sum_whole_and_unpack)]

    def _pack(self, operand: Operand, number: int, chunk: Chunk) -> None:
        chunk.pack(operand, self._rows_of(number, chunk)[self._intra_rank])

    def _sum_whole_and_unpack(
        self, operand: Operand, number: int, chunk: Chunk
    ) -> None:
        rows = list(self._rows_of(number, chunk))
        views = chunk.in_place(operand)
        if views is None:
            buffer = self._own_buffer(chunk)
            sum_rows(rows, buffer, operand.divisor, operand.op)
            chunk.unpack(buffer, operand)
            return
        # This rank's own terms are read from the memory of the sums, so their slot needs no
        # room in a core's cache.
        rows[self._intra_rank], target = views
        sum_rows(rows, target, operand.divisor, operand.op)

    def _sum(self, operand: Operand, number: int, chunk: Chunk) -> None:
        """Write the sum of this rank's shard of the chunk."""
        divisor = operand.divisor
        if self.sums_travel:
            divisor = 1
        shard = shard_slice(chunk.size, self._ranks, self._intra_rank)
        rows = [terms[shard] for terms in self._rows_of(number, chunk)]
        # Shared memory is written once, when they have been divided.
        sums = self._own_buffer(chunk)[shard]
        sum_rows(rows, sums, divisor, operand.op)
        self._sums_of(number, chunk)[shard] = sums

    def _unpack(self, operand: Operand, number: int, chunk: Chunk) -> None:
        chunk.unpack(self._sums_of(number, chunk), operand)

    def _rows_of(self, number: int, chunk: Chunk) -> list[np.ndarray]:
        """Return the chunk's terms from each rank of the node."""
        place = number % len(self._terms[0])
        key = (place, chunk.size, chunk.dtype)
        rows = self._rows.get(key)
        if rows is None:
            dtype = chunk.dtype
            if self.sums_travel:
                dtype = accumulator(dtype)
            nbytes = chunk.size * dtype.itemsize
            rows = [slots[place][:nbytes].view(dtype) for slots in self._terms]
            self._rows[key] = rows
        return rows

    def _sums_of(self, number: int, chunk: Chunk) -> np.ndarray:
        """Return the sums of the chunk, in the dtype in which they travel."""
        slot = self._sums[number % len(self._sums)]
        return slot[: chunk.nbytes].view(chunk.dtype)

    def _own_buffer(self, chunk: Chunk) -> np.ndarray:
        """Return memory of this rank alone for the sums of the chunk."""
        return self._scratch[: chunk.nbytes].view(chunk.dtype)

    def close(self) -> None:
        self._rows = {}  # no view of the window may outlive it
        self._terms = []
        self._sums = []
        self._window.close()
        self._free()

    def _free(self) -> None:
        self._node.Free()
