"""Averages a stream of chunks through the memory that a node's ranks share.

Each chunk passes stages: packed into a slot of its rank, summed over the node's ranks, unpacked. At
tick t stage s works on chunk t - s, and the node's ranks meet once a tick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from ..arrays import accumulator
from ..runtime.progress import barrier
from ..topology import Topology
from .buckets import Chunk, cut
from .reducer import Reducer
from .shared_window import NoSharedMemory, SharedWindow
from .summation import sum_rows, telling_of_overflow

# A chunk stays in a core's cache from packing to unpacking; of 256 KiB to 1.5 MiB this was best for
# 102 MB and two ranks on two cores (256 KiB: 1.3 times as long). Across nodes it is a message too,
# and must outweigh its latency.
CHUNK_BYTES = 1 << 20
# A slot is written again so many chunks later; a chunk is read at the tick after it was written.
SLOTS = 2
# With so few ranks in one node each sums all slots itself, which saves a meeting; with more that
# would move n times the bytes, so each sums a shard for all, but for a lone chunk of which all
# ranks together have no more than that. Time over that with shards, on two cores: 2 ranks 0.84
# (70 KB), 0.97 (7 MB), 1.02 (102 MB); 3 and 4 ranks 0.77 and 0.76 (70 KB), 1.00 and 0.94 (400 KB),
# 1.01 and 0.99 (7 MB), 1.05 both (102 MB).
REDUNDANT_RANKS = 2
REDUNDANT_BYTES = 512 << 10

Stage = Callable[[int, Chunk], None]


class NodeStream(Reducer):
    """The way of gradients in one node; `network_stream` has the one over several."""

    def __init__(
        self, comm: MPI.Intracomm, topology: Topology, chunk_bytes: int | None = None
    ) -> None:
        """Split ``comm`` by node, and allocate the node's window.

        Args:
            comm: all ranks; stays the caller's.
            topology: which rank sits on which node.
            chunk_bytes: instead of the size that was measured; a multiple of 16.

        Raises:
            NoSharedMemory: on all ranks, when some node has no window to give, or some rank no
                memory of its own.
        """
        rank = comm.rank
        self._size = comm.size
        self._ranks = topology.intra_size(rank)
        self._chunk_bytes = chunk_bytes or CHUNK_BYTES
        self._next = 0  # chunks so far: slots go on from call to call
        self._intra = MPI.Intracomm(comm.Split(topology.inter_rank(rank), rank))
        self._place = self._intra.rank
        problem = ""
        try:
            self._allocate()
        except MemoryError:
            problem = f"rank {rank} has no memory for some chunks of its own"
        terms, common = self._window_bytes()
        sizes = [terms + common] + [terms] * (self._ranks - 1)
        try:
            self._window = SharedWindow.open(comm, self._intra, sizes, problem)
        except NoSharedMemory:
            self._free()
            raise
        self._slots = [buffer[:terms] for buffer in self._window.buffers]
        self._common = self._window.buffers[0][terms:]

    def _window_bytes(self) -> tuple[int, int]:
        """Bytes for the terms of each rank, and for what a node's ranks make of them."""
        ring = SLOTS * self._chunk_bytes
        return ring, ring if self._ranks > REDUNDANT_RANKS else 0

    def _allocate(self) -> None:
        """This rank's own memory. A sum of 16-bit numbers takes twice their room."""
        self._work = np.empty(2 * self._chunk_bytes, np.uint8)

    def mean(
        self,
        sources: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        wires: Sequence[np.dtype],
    ) -> None:
        rest = self.begin(sources, targets, wires)
        barrier(self._intra)
        rest()

    def begin(
        self,
        sources: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        wires: Sequence[np.dtype],
    ) -> Callable[[], None]:
        """As :class:`Reducer` says: packs the first chunk.

        Its slot is nobody else's until the ranks meet: what it held before has been read by all
        when a call of :meth:`mean` ends.
        """
        flats = [target if target.ndim == 1 else target.reshape(-1) for target in targets]
        inputs = flats
        if sources is not targets:
            inputs = [
                flat if target is source else source.reshape(-1)
                for source, target, flat in zip(sources, targets, flats, strict=True)
            ]
        todo = cut(tuple([flat.size for flat in flats]), tuple(wires), self._chunk_bytes)
        stages = self._stages(inputs, flats, todo)
        first = self._next
        if todo:
            stages[0](first, todo[0])
        self._window.sync()

        def rest() -> None:
            self._window.sync()
            with telling_of_overflow():
                for tick in range(1, len(todo) + len(stages) - 1 if todo else 0):
                    if tick > 1:
                        self._meet()
                    for stage, work in enumerate(stages):
                        if 0 <= tick - stage < len(todo):
                            work(first + tick - stage, todo[tick - stage])
            self._next = first + len(todo)

        return rest

    def _meet(self) -> None:
        self._window.meet()

    def _stages(
        self, inputs: Sequence[np.ndarray], flats: Sequence[np.ndarray], todo: Sequence[Chunk]
    ) -> list[Stage]:
        def pack(number: int, chunk: Chunk) -> None:
            own = self._slots[self._place]
            chunk.pack(inputs, slot_of(own, SLOTS, number, chunk.size, chunk.dtype))

        def add_and_unpack(number: int, chunk: Chunk) -> None:
            self._add_and_unpack(number, chunk, inputs, flats)

        def unpack(number: int, chunk: Chunk) -> None:
            chunk.unpack(self._sums(number, chunk), flats)

        few = len(todo) == 1 and self._ranks * todo[0].nbytes <= REDUNDANT_BYTES
        if self._ranks <= REDUNDANT_RANKS or few:
            return [pack, add_and_unpack]
        return [pack, self._sum, unpack]

    def _add_and_unpack(
        self,
        number: int,
        chunk: Chunk,
        inputs: Sequence[np.ndarray],
        flats: Sequence[np.ndarray],
    ) -> None:
        rows = self._terms(number, chunk)
        index, start, stop = chunk.parts[0]
        if len(chunk.parts) > 1 or flats[index].dtype != chunk.dtype:
            mean = self._work[: chunk.nbytes].view(chunk.dtype)
            summed_in_it = accumulator(chunk.dtype) == chunk.dtype
            sum_rows(rows, mean, self._size, mean if summed_in_it else None)
            chunk.unpack(mean, flats)
            return
        out = flats[index][start:stop]
        if accumulator(chunk.dtype) != chunk.dtype:
            sum_rows(rows, out, self._size)
        elif flats[index] is inputs[index] and self._place < 2:
            # Its own term a rank takes from its gradient, which gets the sum: no other memory.
            terms = list(rows)
            terms[self._place] = out
            sum_rows(terms, out, self._size, out, rows)
        else:
            sum_rows(rows, out, self._size, out)

    def _sum(self, number: int, chunk: Chunk) -> None:
        """Take the mean of this rank's shard of the chunk."""
        shard = share(chunk.size, self._ranks, self._intra.rank)
        out = self._sums(number, chunk)[shard]
        rows = [terms[shard] for terms in self._terms(number, chunk)]
        sum_rows(rows, out, self._size, self._room(out))

    def _terms(self, number: int, chunk: Chunk) -> list[np.ndarray]:
        """Each rank's own numbers of the chunk."""
        return [slot_of(slots, SLOTS, number, chunk.size, chunk.dtype) for slots in self._slots]

    def _sums(self, number: int, chunk: Chunk) -> np.ndarray:
        return slot_of(self._common, SLOTS, number, chunk.size, chunk.dtype)

    def _room(self, like: np.ndarray) -> np.ndarray:
        """Private memory to sum such an array in."""
        dtype = accumulator(like.dtype)
        return self._work[: like.size * dtype.itemsize].view(dtype)

    def close(self) -> None:
        if not self._slots:  # closed already
            return
        self._slots, self._common = [], np.empty(0, np.uint8)
        self._window.close()
        self._free()

    def _free(self) -> None:
        self._intra.Free()


def slot_of(ring: np.ndarray, slots: int, number: int, size: int, dtype: np.dtype) -> np.ndarray:
    """The chunk's place, ``size`` numbers of ``dtype``, in a ring of bytes."""
    start = number % slots * (len(ring) // slots)
    return ring[start : start + size * dtype.itemsize].view(dtype)


def share(size: int, parts: int, part: int) -> slice:
    """The part-th of nearly equal stretches of ``range(size)``."""
    return slice(size * part // parts, size * (part + 1) // parts)
