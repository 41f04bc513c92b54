"""Means of gradients over several nodes: shared memory within each, messages between them.

To the stages of :mod:`shared_memory` come those between nodes: while a chunk's messages
travel, the chunks before and after it are packed, summed and unpacked. A node's sum
travels in its wire format, and everything else is done in the dtype in which sums are
accumulated.

Some ranks of each node, its leaders, exchange with other nodes: each sends and receives
an equal share of every chunk; pairwise up to 16 nodes, by :mod:`circulant` among more.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from ..layout import Chunk, Operand, shard_slice
from ..messaging import ProcessGroup
from ..numbers import (
    absmax,
    accumulator,
    bound_of,
    cast_into,
    choose_wire_format,
    ldexp_into,
    mean_format,
    scaled_sum,
    sum_rows,
)
from ..runtime import wait_all
from .circulant import CirculantSum, InFlight, ScaledArray, goes_in_rounds, skips
from .pairwise import start_allgather, start_reduce_scatter
from .shared_memory import SharedMemoryAllreduce, Stage

# Chunks n and n + INTER_NODE_SLOTS use the same slot. What is sent at one tick is
# waited for at the next.
INTER_NODE_SLOTS, IN_FLIGHT = 4, 2
# With many nodes, a chunk's rounds are divided among at most EXCHANGE_TICKS ticks, so
# that there is always a large message among the chunks in flight; and a chunk is
# longer, since Python takes its time for each round.
EXCHANGE_TICKS, ROUNDS_PER_MIB = 4, 4
# The widest numbers that are summed: complex256.
WIDEST_BYTES = 32
# Tags of messages between nodes.
FORMATS, SUMS, MEANS = 0, 1, 2
# What lies in the node's window beside each rank's terms: the node's sums, the same in
# the wire dtype, the means, and what the wire formats of each shard of the sums and of
# the means depend on.
SUM_RING, NARROW_RING, MEAN_RING, STATS_RING = range(4)
STATS_DTYPE = np.dtype(np.float64)


class TwoLevelAllreduce(SharedMemoryAllreduce):
    """Sums and means over several nodes; no maxima or minima."""

    # A chunk is a message, too, and must outweigh its latency.
    default_chunk_bytes, most_chunks, num_slots = 1 << 20, 1, INTER_NODE_SLOTS

    def __init__(
        self, group: ProcessGroup, chunk_bytes: int | None, leaders: int
    ) -> None:
        """Split the ranks by node and by leader, and allocate each node's window (collective).

        See :class:`SharedMemoryAllreduce`. Each node has as many ``leaders``, so at
        most the ranks of the smallest node.
        """
        comm, rank, topology = group.comm, group.rank, group.topology
        self._nodes, self._node = topology.inter_size, topology.inter_rank(rank)
        self._leaders, self._leader_index = leaders, topology.intra_rank(rank)
        # Its ranks are in the order of nodes.
        color = self._leader_index if self._leader_index < leaders else MPI.UNDEFINED
        self._inter = MPI.Intracomm(comm.Split(color, self._node))
        self._circulant = CirculantSum(self._inter)
        # By chunk; and whose turns a tick has.
        self._exchanges: dict[int, InFlight] = {}
        self._turns: list[int] = []
        self._by_circulant = goes_in_rounds(self._nodes)
        self._rounds = 2  # of a chunk
        if self._by_circulant:
            self._rounds *= len(skips(self._nodes))
            self.default_chunk_bytes *= -(-len(skips(self._nodes)) // ROUNDS_PER_MIB)
        super().__init__(group, chunk_bytes)

    def _window_bytes(self) -> tuple[int, list[int]]:
        chunk, stats = self._chunk_bytes, (self._ranks * 2 + 1) * STATS_DTYPE.itemsize
        # Within a node 16-bit numbers are kept as float32, which saves conversions; see
        # docs/decisions/float16.md.
        sizes = [
            INTER_NODE_SLOTS * each for each in (2 * chunk, chunk, 2 * chunk, stats)
        ]
        return INTER_NODE_SLOTS * 2 * chunk, sizes

    def _allocate(self) -> None:
        super()._allocate()
        if self._by_circulant:
            return
        # Shards differ by an element, and rows are as long as this node's.
        nbytes = 2 * self._chunk_bytes + WIDEST_BYTES * self._nodes
        self._received = np.empty(IN_FLIGHT * nbytes, np.uint8)
        self._wide_rows = np.empty(nbytes, np.uint8)

    def _stages(self, redundant: bool) -> list[Stage]:
        # Not more ticks than rounds: means are written in their slot after half of
        # them.
        ticks: list[Stage] = [self._exchange] * min(EXCHANGE_TICKS, self._rounds)
        exchange = [self._begin_exchange, *ticks]
        return [self._pack, self._sum_in_node, self._quantize, *exchange, self._unpack]

    def _sum_in_node(self, operand: Operand, number: int, chunk: Chunk) -> None:
        """Sum this rank's shard of the chunk over the node."""
        assert operand.op is np.add
        shard = self._own_shard(chunk)
        out = self._sums(number, chunk)[shard]
        exponent = scaled_sum(
            [terms[shard] for terms in self._terms(number, chunk)], out
        )
        self._shard_stats(number)[self._intra_rank] = exponent, absmax(out, chunk.dtype)

    def _quantize(self, _: Operand, number: int, chunk: Chunk) -> None:
        """Convert this rank's shard of the node's sums to their wire format."""
        sums = self._sums(number, chunk)[self._own_shard(chunk)]
        exponents = self._shard_stats(number)[:, 0]
        shift = int(exponents[self._intra_rank] - exponents.max())
        if shift:  # another shard's sums were too large
            ldexp_into(sums, shift, sums)
        sent = self._sent(number, chunk)
        if sent.array.dtype != sums.dtype:
            work = self._scratch(sums)
            ldexp_into(sums, -sent.exponent, work)
            cast_into(work, sent.array[self._own_shard(chunk)])

    def _begin_exchange(self, operand: Operand, number: int, chunk: Chunk) -> None:
        """Start the first round of this leader's share of the chunk."""
        if self._inter == MPI.COMM_NULL:
            return
        if not self._by_circulant:
            self._exchanges[number] = InFlight(self._pairwise(operand, number, chunk))
            return
        sent, own = self._sent(number, chunk), self._sums(number, chunk)

        def share_of_means(bound: float) -> ScaledArray:
            whole = self._means_of(operand, number, chunk, bound)
            return ScaledArray(self._leader_share(whole.array), whole.exponent)

        self._exchanges[number] = self._circulant.begin(
            ScaledArray(self._leader_share(sent.array), sent.exponent),
            ScaledArray(self._leader_share(own), self._exponent(number)),
            share_of_means,
            chunk.dtype,
            operand.divisor,
        )

    def _pairwise(
        self, operand: Operand, number: int, chunk: Chunk
    ) -> Iterator[list[MPI.Request]]:
        """Node i sums the i-th part of the share over nodes, and sends the mean to the others."""
        sent = self._sent(number, chunk)
        shards = self._leader_shards(sent.array)
        own = self._leader_shards(self._sums(number, chunk))[self._node]
        # Room for that shard from each node, in bytes: private memory, in a ring.
        start = number % IN_FLIGHT * (len(self._received) // IN_FLIGHT)
        room = self._received[start : start + self._nodes * own.nbytes]
        rows = list(room.reshape(self._nodes, own.nbytes))
        # Of each node: the exponent, and whether its sums have the wire dtype.
        table = np.zeros((self._nodes, 2), np.int64)
        table[self._node] = sent.exponent, sent.array.dtype == chunk.dtype
        yield [
            *start_allgather(self._inter, list(table), FORMATS),
            *start_reduce_scatter(self._inter, shards, rows, SUMS),
        ]
        formats = table.tolist()
        bound = max([bound_of(exponent, bool(narrow)) for exponent, narrow in formats])
        means = self._means_of(operand, number, chunk, bound)
        shards = self._leader_shards(means.array)
        if own.size:
            # This node's own sums are here as they were summed.
            formats[self._node] = [self._exponent(number), 0]
            rows[self._node] = own
            mean = ScaledArray(shards[self._node], means.exponent)
            self._sum_over_nodes(rows, formats, chunk.dtype, mean, operand.divisor)
        yield start_allgather(self._inter, shards, MEANS)

    def _sum_over_nodes(
        self,
        rows: list[np.ndarray],
        formats: list[list[int]],
        narrow: np.dtype,
        mean: ScaledArray,
        divisor: int,
    ) -> None:
        """Write the mean of a shard; the terms of each node are a row, in its format."""
        dtype, size = accumulator(narrow), mean.array.size
        common = max(0, *[exponent for exponent, _ in formats])
        wide_rows = self._wide_rows.view(dtype)
        for node, (exponent, is_narrow) in enumerate(formats):
            row, wide = (
                rows[node].view(dtype),
                wide_rows[node * size : (node + 1) * size],
            )
            if is_narrow and narrow != dtype:
                cast_into(row.view(narrow)[:size], wide)
                row = wide
            if exponent != common:
                ldexp_into(row, exponent - common, wide)
                row = wide
            rows[node] = row
        divided = divisor * 2.0 ** (mean.exponent - common)
        sum_rows(rows, mean.array, divided, self._scratch(mean.array))

    def _exchange(self, _: Operand, number: int, __: Chunk) -> None:
        """Take this tick's rounds of a chunk; by circulant, of all chunks in turn."""
        if number not in self._exchanges:
            return
        # The oldest of a tick's chunks comes last here, and must be the first to end a
        # round.
        self._turns.insert(0, number)
        if self._by_circulant and number != min(self._exchanges):
            return
        for _round in range(-(-self._rounds // EXCHANGE_TICKS)):
            for each in [turn for turn in self._turns if turn in self._exchanges]:
                exchange = self._exchanges[each]
                wait_all(exchange.requests)
                exchange.advance()
                if exchange.is_over:
                    del self._exchanges[each]
        self._turns.clear()

    def _unpack(self, operand: Operand, number: int, chunk: Chunk) -> None:
        flats = operand.targets
        means = self._means_of(operand, number, chunk)
        array, (index, start, stop) = means.array, chunk.segments[0]
        is_alone = len(chunk.segments) == 1  # and then cast
        if means.exponent:
            array = flats[index][start:stop] if is_alone else self._scratch(means.array)
            cast_into(means.array, array)
            ldexp_into(array, means.exponent, array)
            if is_alone:
                return
        with np.errstate(all="ignore"):  # of 16 bits may be infinite
            chunk.unpack(array, flats)

    # Where things are in memory.

    def _numbers(self, ring: np.ndarray, number: int, chunk: Chunk) -> np.ndarray:
        return self._slot(ring, number, chunk.size, accumulator(chunk.dtype))

    def _sums(self, number: int, chunk: Chunk) -> np.ndarray:
        return self._numbers(self._rings[SUM_RING], number, chunk)

    def _means_of(
        self, operand: Operand, number: int, chunk: Chunk, bound: float | None = None
    ) -> ScaledArray:
        """Return where the means go, which ``bound`` decides; a leader gives it to its node."""
        shared = self._stats(number)[-1:]
        if bound is None:
            bound = float(shared[0])
        elif self._leader_index == 0:
            shared[0] = bound
        targets = operand.targets
        is_cast = any(
            [targets[index].dtype != chunk.dtype for index, _, _ in chunk.segments]
        )
        chosen = mean_format(bound, chunk.dtype, is_cast)
        ring = self._rings[MEAN_RING]
        array = self._slot(ring, number, chunk.size, chosen.dtype)
        return ScaledArray(array, chosen.exponent)

    def _sent(self, number: int, chunk: Chunk) -> ScaledArray:
        """Return the node's sums as they travel."""
        # NaN, if there is one.
        exponent, largest = self._shard_stats(number).max(axis=0)
        chosen = choose_wire_format(float(largest), int(exponent), chunk.dtype)
        if chosen.dtype == accumulator(chunk.dtype):
            return ScaledArray(self._sums(number, chunk), chosen.exponent)
        narrow = self._slot(self._rings[NARROW_RING], number, chunk.size, chunk.dtype)
        return ScaledArray(narrow, chosen.exponent)

    def _shard_stats(self, number: int) -> np.ndarray:
        """Return (ranks, 2): the power of 2 by which each shard is divided, and its absmax."""
        return self._stats(number)[:-1].reshape(-1, 2)

    def _stats(self, number: int) -> np.ndarray:
        ring, count = self._rings[STATS_RING], 2 * self._ranks + 1
        return self._slot(ring, number, count, STATS_DTYPE)

    def _exponent(self, number: int) -> int:
        """Return that of the power of two by which the node's sums are divided."""
        return int(self._shard_stats(number)[:, 0].max())

    def _leader_share(self, whole: np.ndarray) -> np.ndarray:
        return whole[shard_slice(whole.size, self._leaders, self._leader_index)]

    def _leader_shards(self, whole: np.ndarray) -> list[np.ndarray]:
        """Return this leader's share of a chunk, divided into a shard for each node."""
        share = self._leader_share(whole)
        return [
            share[shard_slice(share.size, self._nodes, node)]
            for node in range(self._nodes)
        ]

    def _free(self) -> None:
        super()._free()
        if self._inter != MPI.COMM_NULL:
            self._inter.Free()
