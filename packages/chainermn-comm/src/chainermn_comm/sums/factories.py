"""The algorithms for gradients in host memory: functions that make one for a group's topology."""

from __future__ import annotations

import sys
from typing import NoReturn

from ..layout import Operand
from ..messaging import Algorithm, ProcessGroup
from .chunked_sum import ChunkedSum
from .circulant import rounds_of
from .message_sum import is_pairwise, message_sum
from .shared_memory import SharedMemoryAllreduce
from .shared_window import NoSharedMemory
from .two_level import TwoLevelAllreduce

# Sizes for pairwise sums. On one node the terms of a chunk stay in a core's cache.
# Between nodes MPI progresses messages only during its calls; several chunks keep a
# link of 1 Gbit/s busy for some ten milliseconds between them.
NODE_CHUNK_BYTES = 4 << 20
CHUNK_BYTES = 2 << 20
AT_ONCE = 4
# The size for sums on a circulant graph, whose rounds take much longer than latency and
# Python. See docs/decisions/sums.md.
BYTES_PER_ROUND = 512 << 10
# But no shard is shorter than this. So from some hundred ranks on, a rank receives more
# bytes.
LEAST_SHARD_BYTES = 8 << 10


def packed(group: ProcessGroup) -> Algorithm:
    """Through MPI, small arrays packed together."""
    return _by_messages(group, packs=True)


def per_tensor(group: ProcessGroup) -> Algorithm:
    """Through MPI, every array by itself."""
    return _by_messages(group, packs=False)


def _by_messages(group: ProcessGroup, packs: bool) -> Algorithm:
    in_rank_order = group.settings.reproducible
    chunk_bytes = NODE_CHUNK_BYTES
    at_once = 1
    if group.topology.inter_size > 1:
        chunk_bytes = CHUNK_BYTES
        at_once = AT_ONCE
    if is_pairwise(group.size, in_rank_order):
        chunk_bytes = max(chunk_bytes, group.size * LEAST_SHARD_BYTES)
    else:
        chunk_bytes = len(rounds_of(group.size)) * BYTES_PER_ROUND
    chunk_bytes = group.settings.chunk_bytes or chunk_bytes
    take_sum = message_sum(group.comm, group.tag, in_rank_order)
    return ChunkedSum(take_sum, chunk_bytes, at_once, packs)


def rank_ordered(group: ProcessGroup) -> Algorithm:
    """Sum in the order of ranks: bits depend on nothing but the number of ranks."""
    if group.topology.inter_size == 1:
        return single_leader(group)
    return packed(group)


def single_leader(group: ProcessGroup) -> Algorithm:
    """Sum through shared memory in each node; one rank per node exchanges with other nodes."""
    return _through_shared_memory(group, 1)


def multi_leader(group: ProcessGroup) -> Algorithm:
    """Like :func:`single_leader`, but as many ranks as possible exchange, each a shard."""
    return _through_shared_memory(group, group.topology.least_intra_size)


class NoOp(Algorithm):
    """Communicates nothing, to measure everything else."""

    def allreduce(self, operand: Operand) -> None:
        for source, target in zip(operand.sources, operand.targets, strict=True):
            target[...] = source


def no_op(group: ProcessGroup) -> Algorithm:
    """Through nothing: each rank's sum is its own gradient."""
    return NoOp()


def gpus_only(group: ProcessGroup) -> NoReturn:
    """Raise ValueError on all ranks: gradients in host memory have no algorithm."""
    raise ValueError(
        f"rank {group.rank}: communicator 'pure_nccl' takes gradients on GPUs, and these are "
        "NumPy arrays; move the model to the GPU (to_gpu), or on CPUs use one of: flat, "
        "hierarchical, naive, single_node, two_dimensional"
    )


def _through_shared_memory(group: ProcessGroup, leaders: int) -> Algorithm:
    """Return the algorithm for this topology, or ``packed`` if ranks share no memory."""
    nodes = group.topology.inter_size
    if nodes == group.size:  # no two ranks are on one node
        return packed(group)
    # Ranks make windows together: an error of one rank alone ends the job.
    with group.call("a mean of gradients"):
        # The handshake raises if a rank was interrupted since the last handshake.
        group.handshake("preparing sums")
        try:
            if nodes == 1:
                return SharedMemoryAllreduce(group)
            return TwoLevelAllreduce(group, leaders)
        except NoSharedMemory as error:
            if group.rank == 0:
                text = f"ChainerMN: {error}; gradients go through MPI instead"
                print(text, file=sys.stderr)
    return packed(group)
