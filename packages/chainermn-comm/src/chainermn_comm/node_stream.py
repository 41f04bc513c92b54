"""Averages a stream of chunks through the memory that a node's ranks share, and across nodes.

Each chunk passes stages: packed into a slot of its rank, summed over the node's ranks, exchanged
between nodes, unpacked. At tick t stage s works on chunk t - s, and the node's ranks meet once a
tick; so a chunk's message travels while the chunks beside it are packed, summed and unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from .arrays import accumulator
from .chunks import Chunk, cut
from .reducer import Reducer
from .shared_window import NoSharedMemory, SharedWindow
from .summation import sum_rows, telling_of_overflow
from .topology import Topology
from .waiting import barrier, wait_all

# A chunk stays in a core's cache from packing to unpacking; of 256 KiB to 1.5 MiB this was best for
# 102 MB and two ranks on two cores (256 KiB: 1.3 times as long). Across nodes it is a message too,
# and must outweigh its latency.
CHUNK_BYTES = 1 << 20
# A slot is written again so many chunks later. Within a node a chunk is read at the tick after
# it was written; between nodes it is sent at one tick and waited for at the next.
NODE_SLOTS, NETWORK_SLOTS = 2, 4
# With so few ranks in one node each sums all slots itself, which saves a meeting; with more
# that would move n times the bytes, so each sums a shard for all.
REDUNDANT_RANKS = 2

# The widest numbers that are summed: complex256.
WIDEST_BYTES = 32

# Tags of messages between nodes.
SUMS, MEANS = 0, 1

Stage = Callable[[int, Chunk], None]


class NodeStream(Reducer):
    """The way of gradients over one topology."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        topology: Topology,
        lanes: int,
        chunk_bytes: int | None = None,
    ) -> None:
        """Split ``comm`` by node and by lane, and allocate the node's window.

        Args:
            comm: all ranks; stays the caller's.
            topology: which rank sits on which node.
            lanes: ranks of each node that exchange with other nodes, at most the ranks of the
                smallest node; each carries an equal share of every chunk.
            chunk_bytes: instead of the size that was measured; a multiple of 16.

        Raises:
            NoSharedMemory: on all ranks, when some node has no window to give.
        """
        rank = comm.rank
        self._size = comm.size
        self._nodes = topology.inter_size
        self._lanes = lanes
        self._lane = topology.intra_rank(rank)
        self._ranks = topology.intra_size(rank)
        self._intra = MPI.Intracomm(comm.Split(topology.inter_rank(rank), rank))
        in_lane = self._nodes > 1 and self._lane < lanes
        self._inter = comm.Split(self._lane if in_lane else MPI.UNDEFINED, rank)
        largest = max(topology.nodes.count(node) for node in topology.nodes)
        # Sums of a node are scaled to lie in the range of their terms.
        self._scale = 1 << (largest - 1).bit_length() if self._nodes > 1 else comm.size
        self._chunk_bytes, self._ring = _chunk_bytes_and_slots(topology, chunk_bytes)
        self._term_bytes = _term_bytes(topology, self._chunk_bytes)
        terms, ring = self._ring * self._term_bytes, self._ring * self._chunk_bytes
        sizes = [terms + 2 * ring] + [terms] * (self._ranks - 1)
        try:
            self._window = SharedWindow.open(comm, self._intra, sizes)
        except NoSharedMemory:
            self._free()
            raise
        self._slots = [buffer[:terms] for buffer in self._window.buffers]
        self._sums = self._window.buffers[0][terms : terms + ring]
        self._means = self._window.buffers[0][terms + ring :]
        # A sum of 16-bit numbers takes twice their room.
        self._work = np.empty(2 * self._chunk_bytes, np.uint8)
        # Shards differ by an element, and rows are as long as this node's.
        self._row_space = self._chunk_bytes + WIDEST_BYTES * self._nodes
        self._received = np.empty(self._ring * self._row_space, np.uint8)
        self._requests: dict[int, list[MPI.Request]] = {}
        self._next = 0  # chunks so far: slots go on from call to call

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
        stages = self._stages(inputs, flats)
        first = self._next
        if todo:
            stages[0](first, todo[0])
        self._window.sync()

        def rest() -> None:
            self._window.sync()
            with telling_of_overflow():
                for tick in range(1, len(todo) + len(stages) - 1):
                    if tick > 1:
                        self._window.meet()
                    for stage, work in enumerate(stages):
                        if 0 <= tick - stage < len(todo):
                            work(first + tick - stage, todo[tick - stage])
            self._next = first + len(todo)

        return rest

    def _stages(self, inputs: Sequence[np.ndarray], flats: Sequence[np.ndarray]) -> list[Stage]:
        own = self._slots[self._intra.rank]

        def pack(number: int, chunk: Chunk) -> None:
            chunk.pack(inputs, self._terms(own, number, chunk))

        def unpack_sums(number: int, chunk: Chunk) -> None:
            chunk.unpack(self._view(self._sums, number, chunk), flats)

        def unpack_means(number: int, chunk: Chunk) -> None:
            chunk.unpack(self._view(self._means, number, chunk), flats)

        def add_and_unpack(number: int, chunk: Chunk) -> None:
            self._add_and_unpack(number, chunk, inputs, flats)

        if self._nodes > 1:
            return [pack, self._sum, self._scatter, self._combine, self._collect, unpack_means]
        if self._ranks <= REDUNDANT_RANKS:
            return [pack, add_and_unpack]
        return [pack, self._sum, unpack_sums]

    def _add_and_unpack(
        self,
        number: int,
        chunk: Chunk,
        inputs: Sequence[np.ndarray],
        flats: Sequence[np.ndarray],
    ) -> None:
        rows = [self._terms(slots, number, chunk) for slots in self._slots]
        index, start, stop = chunk.parts[0]
        if len(chunk.parts) > 1 or flats[index].dtype != chunk.dtype:
            mean = self._work[: chunk.size * chunk.dtype.itemsize].view(chunk.dtype)
            sum_rows(rows, mean, self._scale)
            chunk.unpack(mean, flats)
            return
        out = flats[index][start:stop]
        if flats[index] is inputs[index] and accumulator(chunk.dtype) == chunk.dtype:
            # Its own term a rank takes from its gradient, which gets the sum: no other memory.
            terms = list(rows)
            terms[self._intra.rank] = out
            sum_rows(terms, out, self._scale, out, rows)
        else:
            sum_rows(rows, out, self._scale)

    def _sum(self, number: int, chunk: Chunk) -> None:
        """Sum this rank's shard of the chunk over the node."""
        shard = _share(chunk.size, self._ranks, self._intra.rank)
        out = self._view(self._sums, number, chunk)[shard]
        rows = [self._terms(slots, number, chunk)[shard] for slots in self._slots]
        sum_rows(rows, out, self._scale, self._room(out))

    def _scatter(self, number: int, chunk: Chunk) -> None:
        """Send each node its shard of this lane's share of the node's sums."""
        if self._inter == MPI.COMM_NULL:
            return
        shards = self._lane_shards(self._sums, number, chunk)
        rows = self._rows(number, shards[self._inter.rank])
        self._exchange(number, shards, rows, SUMS)

    def _combine(self, number: int, chunk: Chunk) -> None:
        """Sum this node's shard over nodes, and send the mean to the others."""
        if self._inter == MPI.COMM_NULL:
            return
        wait_all(self._requests.pop(number))
        node = self._inter.rank
        own = self._lane_shards(self._sums, number, chunk)[node]
        rows = self._rows(number, own)
        rows[node] = own
        shards = self._lane_shards(self._means, number, chunk)
        if own.size:
            sum_rows(rows, shards[node], self._size / self._scale, self._room(own))
        self._exchange(number, [shards[node]] * self._nodes, shards, MEANS)

    def _collect(self, number: int, chunk: Chunk) -> None:
        """Wait for the means of the other nodes' shards."""
        if self._inter != MPI.COMM_NULL:
            wait_all(self._requests.pop(number))

    def _exchange(
        self, number: int, outgoing: list[np.ndarray], incoming: list[np.ndarray], tag: int
    ) -> None:
        others = [node for node in range(self._nodes) if node != self._inter.rank]
        comm, byte = self._inter, MPI.BYTE
        requests = [comm.Irecv([incoming[i], byte], i, tag) for i in others]
        requests += [comm.Isend([outgoing[i], byte], i, tag) for i in others]
        self._requests[number] = requests

    def _view(self, ring: np.ndarray, number: int, chunk: Chunk) -> np.ndarray:
        """The chunk's place in a ring of slots."""
        start = number % self._ring * self._chunk_bytes
        return ring[start : start + chunk.nbytes].view(chunk.dtype)

    def _terms(self, slots: np.ndarray, number: int, chunk: Chunk) -> np.ndarray:
        """A rank's own numbers of the chunk; where sums go on to other nodes, as wide as those."""
        dtype = accumulator(chunk.dtype) if self._nodes > 1 else chunk.dtype
        start = number % self._ring * self._term_bytes
        return slots[start : start + chunk.size * dtype.itemsize].view(dtype)

    def _lane_shards(self, ring: np.ndarray, number: int, chunk: Chunk) -> list[np.ndarray]:
        """This lane's share of the chunk, cut into a shard for each node."""
        share = self._view(ring, number, chunk)[_share(chunk.size, self._lanes, self._lane)]
        return [share[_share(share.size, self._nodes, node)] for node in range(self._nodes)]

    def _rows(self, number: int, like: np.ndarray) -> list[np.ndarray]:
        """Room for this node's shard from each node: private memory, in a ring like the slots."""
        start = number % self._ring * self._row_space
        n = like.nbytes
        return [
            self._received[start + i * n : start + (i + 1) * n].view(like.dtype)
            for i in range(self._nodes)
        ]

    def _room(self, like: np.ndarray) -> np.ndarray:
        """Private memory to sum such an array in."""
        dtype = accumulator(like.dtype)
        return self._work[: like.size * dtype.itemsize].view(dtype)

    def close(self) -> None:
        if not self._slots:  # closed already
            return
        self._slots, self._sums, self._means = [], np.empty(0), np.empty(0)
        self._window.close()
        self._free()

    def _free(self) -> None:
        self._intra.Free()
        if self._inter != MPI.COMM_NULL:
            self._inter.Free()


def _term_bytes(topology: Topology, chunk_bytes: int) -> int:
    """Room for a rank's own numbers of a chunk: across nodes, 16-bit ones lie there as float32.

    Only what goes over a network is narrow then. With float16, two hosts of two ranks on two
    cores, that took 0.63 of the time, which converting had filled.
    """
    return chunk_bytes if topology.inter_size == 1 else 2 * chunk_bytes


def _chunk_bytes_and_slots(topology: Topology, chunk_bytes: int | None) -> tuple[int, int]:
    if topology.inter_size == 1:
        return chunk_bytes or CHUNK_BYTES, NODE_SLOTS
    return chunk_bytes or CHUNK_BYTES, NETWORK_SLOTS


def _share(size: int, parts: int, part: int) -> slice:
    """The part-th of nearly equal stretches of ``range(size)``."""
    return slice(size * part // parts, size * (part + 1) // parts)
