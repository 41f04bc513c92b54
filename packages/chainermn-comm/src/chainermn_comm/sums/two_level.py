"""Means of gradients over several nodes: shared memory within each, messages between them.

The steps of a chunk, one for each tick. The ranks of a node pass a barrier between two
ticks:

    pack     each rank writes its terms to its slot, in the dtype in which they are summed
    sum      each rank sums its shard over the node's ranks, and rounds to the wire's dtype
    begin    each leader starts the messages of its share of the sums
    ...      up to EXCHANGE_TICKS ticks: at the end of each, leaders take the next rounds
    unpack   each rank copies the means

So while messages of some chunks travel, others are packed, summed and unpacked. The
leaders are some ranks of each node, the same number on each: leader i exchanges the i-th share
of each chunk with the i-th leaders of other nodes.
"""

from __future__ import annotations

from mpi4py import MPI

from ..layout import Chunk, Operand, shard_slice
from ..messaging import ProcessGroup
from .message_sum import Sum, message_sum, num_rounds
from .rounds import RunningSum
from .shared_memory import SharedMemoryAllreduce, Stage

# With many nodes, a chunk's rounds are divided among at most EXCHANGE_TICKS ticks, so
# that there is always a large message among the chunks in flight; and chunks are
# longer, since each round costs Python some time.
EXCHANGE_TICKS = 4
ROUNDS_PER_MIB = 8


class TwoLevelAllreduce(SharedMemoryAllreduce):
    """Sums over several nodes."""

    chunks_of_group = 1
    sums_travel = True

    def __init__(self, group: ProcessGroup, leaders: int) -> None:
        """Split the ranks by node and by leader, and allocate each node's window (collective).

        See :class:`SharedMemoryAllreduce`. Each node has this number of
        ``leaders``, which is at most the number of ranks of the smallest node.
        """
        topology = group.topology
        node = topology.inter_rank(group.rank)
        self._leaders = leaders
        self._leader_index = topology.intra_rank(group.rank)
        color = MPI.UNDEFINED
        if self._leader_index < leaders:
            color = self._leader_index
        # Its ranks are in the order of nodes.
        self._inter = MPI.Intracomm(group.comm.Split(color, node))
        self._between: Sum | None = None
        if self._inter != MPI.COMM_NULL:
            self._between = message_sum(self._inter, 0)
        self._begun: list[RunningSum] = []  # in this tick
        self._running: list[RunningSum] = []  # before
        rounds = num_rounds(topology.inter_size)
        self._ticks = min(EXCHANGE_TICKS, rounds)
        self._rounds_a_tick = -(-rounds // self._ticks)
        # Sums are written at a group's second tick, and read until its last one.
        self.sum_groups = self._ticks + 3
        super().__init__(group, -(-rounds // ROUNDS_PER_MIB) << 20)

    def _stages(self, nbytes: int) -> list[Stage]:
        return [
            # This comes first, so that messages travel meanwhile.
            Stage(2, self._begin),
            Stage(0, self._pack),
            Stage(1, self._sum),
            Stage(3 + self._ticks, self._unpack),
        ]

    def _begin(self, operand: Operand, number: int, chunk: Chunk) -> None:
        """Start the first round of this leader's share of the chunk."""
        if self._between is not None:
            share = shard_slice(chunk.size, self._leaders, self._leader_index)
            sums = self._sums_of(number, chunk)[share]
            rounds = self._between(sums, sums, operand.divisor, operand.op)
            self._begun.append(RunningSum(rounds))

    def _end_tick(self) -> None:
        """Take the next rounds of all chunks under way, the oldest chunk first."""
        for _ in range(self._rounds_a_tick):
            for each in self._running:
                each.advance()
        self._running = [each for each in self._running if not each.is_over]
        self._running += self._begun
        self._begun = []

    def _free(self) -> None:
        super()._free()
        if self._between is not None:
            self._inter.Free()
