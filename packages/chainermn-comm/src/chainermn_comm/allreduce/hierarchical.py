"""Averages a stream of chunks over several nodes, of which each shares memory.

To the stages of `node_stream` come those between nodes: while a chunk's messages travel, the
chunks beside it are packed, summed and unpacked. A node's sum travels in the wire's dtype, as its
`heading` says, and all else is done in the dtype that sums are taken in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from ..arrays import accumulator
from ..runtime.progress import wait_all
from ..topology import Topology
from .buckets import Chunk
from .float16 import convert
from .shared_memory import NodeStream, Stage, share, slot_of
from .summation import sum_in_range, sum_rows
from .wire_format import Heading, heading_of, largest_of, scaled

# A slot is written again so many chunks later; what is sent at one tick is waited for at the next.
SLOTS, UNDER_WAY = 4, 2
# The widest numbers that are summed: complex256.
WIDEST_BYTES = 32
# Tags of messages between nodes.
HEADINGS, SUMS, MEANS = 0, 1, 2

NOTE = np.dtype(np.float64)


class NetworkStream(NodeStream):
    """The way of gradients over several nodes."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        topology: Topology,
        lanes: int,
        chunk_bytes: int | None = None,
    ) -> None:
        """Split ``comm`` by node and by lane, and allocate each node's window.

        Args:
            comm: all ranks; stays the caller's.
            topology: which rank sits on which node.
            lanes: ranks of each node that exchange with other nodes, at most the ranks of the
                smallest node; each carries an equal share of every chunk.
            chunk_bytes: instead of the size that was measured; a multiple of 16.

        Raises:
            NoSharedMemory: on all ranks, when some node has no window to give, or some rank no
                memory of its own.
        """
        self._nodes, self._node = topology.inter_size, topology.inter_rank(comm.rank)
        self._lanes, self._lane = lanes, topology.intra_rank(comm.rank)
        # Its ranks are in the order of nodes.
        self._inter = comm.Split(self._lane if self._lane < lanes else MPI.UNDEFINED, self._node)
        self._requests: dict[int, list[MPI.Request]] = {}
        super().__init__(comm, topology, chunk_bytes)
        self._cut_common()

    def _window_bytes(self) -> tuple[int, int]:
        chunk, notes = self._chunk_bytes, self._ranks * 2 * NOTE.itemsize
        # Within a node 16-bit numbers lie as float32: converting them once more took a third of a
        # call between two hosts of two ranks.
        self._sizes = [SLOTS * 2 * chunk, SLOTS * chunk, SLOTS * chunk, SLOTS * notes]
        return SLOTS * 2 * chunk, sum(self._sizes)

    def _cut_common(self) -> None:
        parts = np.split(self._common, np.cumsum(self._sizes)[:-1])
        # A node's sums, the same in the wire's dtype, the means, and notes on the sums.
        self._sum_ring, self._narrow_ring, self._mean_ring, self._note_ring = parts

    def _allocate(self) -> None:
        super()._allocate()
        # Shards differ by an element, and rows are as long as this node's.
        room = 2 * self._chunk_bytes + WIDEST_BYTES * self._nodes
        self._received = np.empty(UNDER_WAY * room, np.uint8)
        self._widened = np.empty(room, np.uint8)
        # Of each node: the exponent, and whether its sums have the wire's dtype.
        self._headings = np.zeros((UNDER_WAY, self._nodes, 2), np.int64)

    def _stages(
        self, inputs: Sequence[np.ndarray], flats: Sequence[np.ndarray], todo: Sequence[Chunk]
    ) -> list[Stage]:
        def pack(number: int, chunk: Chunk) -> None:
            chunk.pack(inputs, self._terms(number, chunk)[self._intra.rank])

        def unpack(number: int, chunk: Chunk) -> None:
            chunk.unpack(self._means(number, chunk), flats)

        stages = [pack, self._sum, self._fit, self._scatter, self._combine, self._collect]
        return [*stages, unpack]

    def _sum(self, number: int, chunk: Chunk) -> None:
        """Sum this rank's shard of the chunk over the node."""
        shard = self._own_shard(chunk)
        out = self._sums(number, chunk)[shard]
        exponent = sum_in_range([terms[shard] for terms in self._terms(number, chunk)], out)
        self._notes(number)[self._intra.rank] = exponent, largest_of(out, chunk.dtype)

    def _fit(self, number: int, chunk: Chunk) -> None:
        """Make this rank's shard of the node's sums fit the dtype in which they travel."""
        sums = self._sums(number, chunk)[self._own_shard(chunk)]
        exponents = self._notes(number)[:, 0]
        shift = int(exponents[self._intra.rank] - exponents.max())
        if shift:  # another shard's sums were too large
            scaled(sums, shift, sums)
        heading = self._heading(number, chunk)
        if heading.dtype != sums.dtype:
            work = self._room(sums)
            scaled(sums, -heading.exponent, work)
            convert(work, self._travelling(number, chunk, heading)[self._own_shard(chunk)])

    def _scatter(self, number: int, chunk: Chunk) -> None:
        """Send each node its shard of this lane's share of the node's sums."""
        if self._inter == MPI.COMM_NULL:
            return
        heading = self._heading(number, chunk)
        shards = self._lane_shards(self._travelling(number, chunk, heading))
        headings = self._headings[number % UNDER_WAY]
        headings[self._node] = heading.exponent, heading.dtype == chunk.dtype
        self._exchange(number, [headings[self._node]] * self._nodes, list(headings), HEADINGS)
        sums = self._lane_shards(self._sums(number, chunk))[self._node]
        self._exchange(number, shards, self._rows(number, sums), SUMS)

    def _combine(self, number: int, chunk: Chunk) -> None:
        """Sum this node's shard over nodes, and send the mean to the others."""
        if self._inter == MPI.COMM_NULL:
            return
        wait_all(self._requests.pop(number))
        own = self._lane_shards(self._sums(number, chunk))[self._node]
        shards = self._lane_shards(self._means(number, chunk))
        if own.size:
            rows, exponent = self._summands(number, chunk, own)
            divisor = self._size / 2**exponent
            sum_rows(rows, shards[self._node], divisor, self._room(shards[self._node]))
        self._exchange(number, [shards[self._node]] * self._nodes, shards, MEANS)

    def _collect(self, number: int, chunk: Chunk) -> None:
        """Wait for the means of the other nodes' shards."""
        if self._inter != MPI.COMM_NULL:
            wait_all(self._requests.pop(number))

    def _exchange(
        self, number: int, outgoing: list[np.ndarray], incoming: list[np.ndarray], tag: int
    ) -> None:
        others = [node for node in range(self._nodes) if node != self._node]
        comm, byte = self._inter, MPI.BYTE
        requests = [comm.Irecv([incoming[i], byte], i, tag) for i in others]
        requests += [comm.Isend([outgoing[i], byte], i, tag) for i in others]
        self._requests.setdefault(number, []).extend(requests)

    def _summands(self, number: int, chunk: Chunk, own: np.ndarray) -> tuple[list[np.ndarray], int]:
        """Each node's sums of the shard, all divided by 2 to one power, and that power."""
        headings = self._headings[number % UNDER_WAY].tolist()
        # This node's own lie here as they were summed.
        headings[self._node] = [int(self._notes(number)[:, 0].max()), 0]
        common = max(0, *[exponent for exponent, _ in headings])
        rows = self._rows(number, own)
        for node, (exponent, narrow) in enumerate(headings):
            row = own if node == self._node else rows[node].view(own.dtype)
            if narrow and chunk.dtype != own.dtype:
                rows[node] = self._widened_row(node, own)
                convert(row.view(chunk.dtype)[: own.size], rows[node])
                row = rows[node]
            if exponent != common:
                rows[node] = self._widened_row(node, own)
                scaled(row, exponent - common, rows[node])
            else:
                rows[node] = row
        return rows, common

    # Where things lie.

    def _own_shard(self, chunk: Chunk) -> slice:
        """What of the chunk this rank sums over its node."""
        return share(chunk.size, self._ranks, self._intra.rank)

    def _terms(self, number: int, chunk: Chunk) -> list[np.ndarray]:
        """Each rank's own numbers of the chunk."""
        dtype = accumulator(chunk.dtype)
        return [slot_of(slots, SLOTS, number, chunk.size, dtype) for slots in self._slots]

    def _sums(self, number: int, chunk: Chunk) -> np.ndarray:
        return slot_of(self._sum_ring, SLOTS, number, chunk.size, accumulator(chunk.dtype))

    def _means(self, number: int, chunk: Chunk) -> np.ndarray:
        return slot_of(self._mean_ring, SLOTS, number, chunk.size, chunk.dtype)

    def _travelling(self, number: int, chunk: Chunk, heading: Heading) -> np.ndarray:
        """The node's sums as they travel."""
        if heading.dtype == accumulator(chunk.dtype):
            return self._sums(number, chunk)
        return slot_of(self._narrow_ring, SLOTS, number, chunk.size, chunk.dtype)

    def _notes(self, number: int) -> np.ndarray:
        """Of each rank's shard of the sums: by which power of 2 it is divided, and its largest."""
        return slot_of(self._note_ring, SLOTS, number, 2 * self._ranks, NOTE).reshape(-1, 2)

    def _heading(self, number: int, chunk: Chunk) -> Heading:
        """How the node's sums travel."""
        exponent, largest = self._notes(number).max(axis=0)  # NaN, if there is one
        return heading_of(float(largest), int(exponent), chunk.dtype)

    def _lane_shards(self, whole: np.ndarray) -> list[np.ndarray]:
        """This lane's share of a chunk, cut into a shard for each node."""
        part = whole[share(whole.size, self._lanes, self._lane)]
        return [part[share(part.size, self._nodes, node)] for node in range(self._nodes)]

    def _rows(self, number: int, like: np.ndarray) -> list[np.ndarray]:
        """Room for this node's shard from each node, in bytes: private memory, in a ring."""
        start = number % UNDER_WAY * (len(self._received) // UNDER_WAY)
        n = like.nbytes
        return [self._received[start + i * n : start + (i + 1) * n] for i in range(self._nodes)]

    def _widened_row(self, node: int, like: np.ndarray) -> np.ndarray:
        n = like.nbytes
        return self._widened[node * n : (node + 1) * n].view(like.dtype)

    def close(self) -> None:
        # No view of the window may outlive it.
        self._sum_ring = self._narrow_ring = self._mean_ring = self._note_ring = np.empty(0)
        super().close()

    def _free(self) -> None:
        super()._free()
        if self._inter != MPI.COMM_NULL:
            self._inter.Free()
