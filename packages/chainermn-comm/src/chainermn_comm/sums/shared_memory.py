"""Means of gradients on one node, by way of memory that its ranks share.

Each group of chunks passes stages: packed into slots of its rank, summed over the
node's ranks, unpacked. At tick t stage s works on group t - s, and the node's ranks
pass a barrier once a tick.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import numpy as np
from mpi4py import MPI

from ..layout import Chunk, Dtypes, Operand, plan_chunks, shard_slice
from ..messaging import Algorithm, ProcessGroup
from ..numbers import accumulator, overflow_errstate, sum_rows
from ..runtime import barrier
from .shared_window import NoSharedMemory, SharedWindow

# A chunk is summed in a core's cache. How many of them stay in it from packing to
# unpacking depends on the machine; a group has room for MOST_CHUNKS.
SHARED_CHUNK_BYTES = 256 << 10
MOST_CHUNKS = 8
# Groups n and n + WINDOW_GROUPS use the same slots; one is read at the tick after it
# was written.
WINDOW_GROUPS = 2
# On a node of at most REDUNDANT_RANKS ranks, each rank sums the whole chunk itself: one
# barrier less. With more ranks, each sums one shard for all, since n times the bytes
# would move; but every rank still sums what has at most REDUNDANT_BYTES over all ranks.
# See docs/decisions/shared-memory.md.
REDUNDANT_RANKS = 2
REDUNDANT_BYTES = 512 << 10
# Making views of slots anew takes as long as a small model's sum; models have few sizes
# of chunks.
CACHED_VIEWS = 256

# Does a step of the sum of a chunk, of an operand whose arrays are 1-D; chunks are
# numbered.
Stage = Callable[[Operand, int, Chunk], None]


class SharedMemoryAllreduce(Algorithm):
    """Means on one node; :mod:`two_level` adds the exchange between nodes."""

    default_chunk_bytes, most_chunks = SHARED_CHUNK_BYTES, MOST_CHUNKS
    num_slots = WINDOW_GROUPS * MOST_CHUNKS

    def __init__(self, group: ProcessGroup, chunk_bytes: int | None) -> None:
        """Split the ranks by node, and allocate the node's window (collective).

        Where that or some rank's own memory can't be had, NoSharedMemory is raised on
        all ranks.
        """
        comm, rank, topology = group.comm, group.rank, group.topology
        self._ranks = topology.intra_size(rank)
        self._chunk_bytes = chunk_bytes or self.default_chunk_bytes
        # Of the last call, as loops repeat it. In the end: groups, and whether each
        # rank sums them.
        self._last: tuple[list[int], Dtypes, list[list[Chunk]], bool]
        self._last = [], [], [], True
        # By slot, size and dtype: each rank's numbers.
        self._views: dict[tuple[int, int, np.dtype], list[np.ndarray]] = {}
        self._next_group = 0  # groups so far: slot numbers go on from call to call
        # Another one for each call that has packed its first group.
        self._packed = object()
        self._intra = MPI.Intracomm(comm.Split(topology.inter_rank(rank), rank))
        self._intra_rank = self._intra.rank
        reason = ""
        try:
            self._allocate()
        except MemoryError:
            reason = f"rank {rank} has no memory for some chunks of its own"
        terms, common = self._window_bytes()
        sizes = [terms + sum(common)] + [terms] * (self._ranks - 1)
        try:
            self._window = SharedWindow.open(comm, self._intra, sizes, reason)
        except NoSharedMemory:
            self._free()
            raise
        self._slots = [buffer[:terms] for buffer in self._window.buffers]
        # What all ranks share follows the terms of the first.
        ends = list(accumulate(common, initial=terms))
        self._rings = [
            self._window.buffers[0][start:end] for start, end in pairwise(ends)
        ]

    def _window_bytes(self) -> tuple[int, list[int]]:
        """Return the bytes for the terms of each rank, and for the rings that all ranks share."""
        ring = self.num_slots * self._chunk_bytes
        return ring, [ring if self._ranks > REDUNDANT_RANKS else 0]

    def _allocate(self) -> None:
        """Allocate this rank's own memory. 16-bit numbers are summed in twice their bytes."""
        self._work = np.empty(2 * self._chunk_bytes, np.uint8)

    def allreduce(self, operand: Operand) -> None:
        rest = self.prepare(operand)
        barrier(self._intra)
        rest()

    def prepare(self, operand: Operand) -> Callable[[], None]:
        # Pack the first chunk. No other rank accesses its slot until the barrier: what
        # it held before has been read by all ranks when a call of `allreduce` ends.
        flat = operand.flattened()
        groups, redundant = self._planned(flat)
        stages, first = self._stages(redundant), self._next_group
        token = self._packed = object()

        def work(stage: Stage, index: int) -> None:
            number = (first + index) * self.most_chunks
            for place, chunk in enumerate(groups[index]):
                stage(flat, number + place, chunk)

        if groups:
            work(stages[0], 0)
        self._window.sync()

        def rest() -> None:
            # Another call has used the slots since, or packed into them.
            if self._next_group != first or self._packed is not token:
                self.allreduce(operand)
                return
            self._window.sync()
            with overflow_errstate():
                for tick in range(1, len(groups) + len(stages) - 1 if groups else 0):
                    if tick > 1:
                        self._window.barrier()
                    for place, stage in enumerate(stages):
                        if 0 <= tick - place < len(groups):
                            work(stage, tick - place)
            self._next_group = first + len(groups)

        return rest

    def _planned(self, operand: Operand) -> tuple[list[list[Chunk]], bool]:
        """Return the groups of chunks, and whether each rank may sum all of them."""
        sizes = [target.size for target in operand.targets]
        dtypes = operand.wire_dtypes
        last_sizes, last_dtypes, groups, redundant = self._last
        # Compared here, since hashing for a cache takes longer.
        if sizes != last_sizes or dtypes is not last_dtypes:
            chunks = plan_chunks(tuple(sizes), tuple(dtypes), self._chunk_bytes)
            most = self.most_chunks
            groups = [
                chunks[start : start + most] for start in range(0, len(chunks), most)
            ]
            nbytes = self._ranks * sum([chunk.nbytes for chunk in chunks])
            redundant = self._ranks <= REDUNDANT_RANKS or nbytes <= REDUNDANT_BYTES
            self._last = sizes, dtypes, groups, redundant
        return groups, redundant

    def _stages(self, redundant: bool) -> list[Stage]:
        """Return what is done with each chunk; ``redundant``, each rank may sum all of it."""
        if redundant:
            return [self._pack, self._add_and_unpack]
        return [self._pack, self._sum, self._unpack]

    def _pack(self, operand: Operand, number: int, chunk: Chunk) -> None:
        chunk.pack(operand.sources, self._terms(number, chunk)[self._intra_rank])

    def _unpack(self, operand: Operand, number: int, chunk: Chunk) -> None:
        chunk.unpack(self._means(number, chunk), operand.targets)

    def _add_and_unpack(self, operand: Operand, number: int, chunk: Chunk) -> None:
        flats = operand.targets
        rows, originals = self._terms(number, chunk), None
        index, start, stop = chunk.segments[0]
        is_packed = len(chunk.segments) > 1 or flats[index].dtype != chunk.dtype
        out = (
            self._work[: chunk.nbytes].view(chunk.dtype)
            if is_packed
            else flats[index][start:stop]
        )
        work = out if accumulator(chunk.dtype) == chunk.dtype else None
        in_place = flats[index] is operand.sources[index] and not is_packed
        if in_place and work is not None and self._intra_rank < 2:
            # This rank's own values are read from its gradient, which the sum
            # overwrites.
            originals, rows = rows, list(rows)
            rows[self._intra_rank] = out
        sum_rows(rows, out, operand.divisor, work, originals, operand.op)
        if is_packed:
            chunk.unpack(out, flats)

    def _sum(self, operand: Operand, number: int, chunk: Chunk) -> None:
        """Write the result of this rank's shard of the chunk."""
        shard = self._own_shard(chunk)
        out = self._means(number, chunk)[shard]
        rows = [terms[shard] for terms in self._terms(number, chunk)]
        sum_rows(rows, out, operand.divisor, self._scratch(out), op=operand.op)

    def _terms(self, number: int, chunk: Chunk) -> list[np.ndarray]:
        """Return each rank's own numbers of the chunk."""
        key = number % self.num_slots, chunk.size, chunk.dtype
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= CACHED_VIEWS:
                self._views.clear()
            found = [self._numbers(slots, number, chunk) for slots in self._slots]
            self._views[key] = found
        return found

    def _means(self, number: int, chunk: Chunk) -> np.ndarray:
        return self._numbers(self._rings[0], number, chunk)

    def _numbers(self, ring: np.ndarray, number: int, chunk: Chunk) -> np.ndarray:
        """Return the chunk's slot, in the dtype in which terms are kept."""
        return self._slot(ring, number, chunk.size, chunk.dtype)

    def _slot(
        self, ring: np.ndarray, number: int, size: int, dtype: np.dtype
    ) -> np.ndarray:
        """Return the slot of a chunk, ``size`` numbers of ``dtype``, in a ring of bytes."""
        start = number % self.num_slots * (len(ring) // self.num_slots)
        return ring[start : start + size * dtype.itemsize].view(dtype)

    def _own_shard(self, chunk: Chunk) -> slice:
        """Return what of the chunk this rank sums over its node."""
        return shard_slice(chunk.size, self._ranks, self._intra_rank)

    def _scratch(self, like: np.ndarray) -> np.ndarray:
        """Return private memory to sum such an array in."""
        dtype = accumulator(like.dtype)
        return self._work[: like.size * dtype.itemsize].view(dtype)

    def close(self) -> None:
        if not self._slots:  # closed already
            return
        self._slots, self._rings = [], []  # no view of the window may outlive it
        self._views.clear()
        self._window.close()
        self._free()

    def _free(self) -> None:
        self._intra.Free()
