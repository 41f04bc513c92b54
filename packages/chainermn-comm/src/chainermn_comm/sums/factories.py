"""The algorithms for gradients in host memory: functions that make one for a group's topology."""

from __future__ import annotations

import sys
from typing import NoReturn

from ..layout import Operand
from ..messaging import Algorithm, ProcessGroup
from .bucketed import Bucketed
from .circulant import CirculantAllreduce, default_chunk_bytes, goes_in_rounds
from .pairwise import BLOCKING, OVERLAPPED, PairwiseAllreduce
from .partitioned import LargeInPlace, Partitioned, is_narrowed
from .shared_memory import SharedMemoryAllreduce
from .shared_window import NoSharedMemory
from .two_level import TwoLevelAllreduce


def packed(group: ProcessGroup) -> Algorithm:
    """Through MPI, small arrays packed together."""
    return _by_messages(group, per_tensor=False)


def per_tensor(group: ProcessGroup) -> Algorithm:
    """Through MPI, every array by itself."""
    return _by_messages(group, per_tensor=True)


def _by_messages(group: ProcessGroup, per_tensor: bool) -> Algorithm:
    chunk_bytes = group.settings.chunk_bytes
    if chunk_bytes is None and goes_in_rounds(group.size):
        chunk_bytes = default_chunk_bytes(group.size)
    return Bucketed(by_messages(group).allreduce, chunk_bytes, per_tensor)


def rank_ordered(group: ProcessGroup) -> Algorithm:
    """In the order of ranks: bits depend on nothing but the number of ranks."""
    is_shared = group.topology.inter_size == 1
    pairwise = PairwiseAllreduce(group, BLOCKING if is_shared else OVERLAPPED)
    # Users don't set how many narrowed numbers share an exponent.
    by_messages = LargeInPlace(pairwise, Bucketed(pairwise.allreduce))
    if not is_shared:
        return by_messages
    # Only of what becomes 16 bits wide the bits depend on the algorithm.
    return Partitioned(is_narrowed, by_messages, single_leader(group))


def single_leader(group: ProcessGroup) -> Algorithm:
    """Through shared memory in each node; one rank of each exchanges with other nodes."""
    return _through_shared_memory(group, 1)


def multi_leader(group: ProcessGroup) -> Algorithm:
    """Through shared memory in each node; as many ranks as possible exchange, each a shard."""
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


def by_messages(group: ProcessGroup) -> PairwiseAllreduce | CirculantAllreduce:
    """Return the sum over all ranks by messages: pairwise if few, or to keep their order."""
    if goes_in_rounds(group.size) and not group.settings.reproducible:
        return CirculantAllreduce(group)
    apart = group.topology.inter_size == group.size
    return PairwiseAllreduce(group, OVERLAPPED if apart else BLOCKING)


def _through_shared_memory(group: ProcessGroup, leaders: int) -> Algorithm:
    """Return the algorithm for this topology, or ``packed`` where a node has no shared memory."""
    comm, topology = group.comm, group.topology
    if comm.size == 1:
        return packed(group)
    shared: SharedMemoryAllreduce | None = None
    cause = ""
    # Ranks make windows together: what one of them alone raises ends the job.
    with group.call("a mean of gradients"):
        # If memory doesn't suffice for the setting, it may for the default.
        for chunk_bytes in dict.fromkeys((group.settings.chunk_bytes, None)):
            try:
                if topology.inter_size == 1:
                    shared = SharedMemoryAllreduce(group, chunk_bytes)
                else:
                    shared = TwoLevelAllreduce(group, chunk_bytes, leaders)
                break
            except NoSharedMemory as error:
                cause = str(error)
    if shared is None:
        if comm.rank == 0:
            print(
                f"ChainerMN: {cause}; gradients go through MPI instead", file=sys.stderr
            )
        return packed(group)
    if topology.inter_size == comm.size:  # no two ranks share memory
        return LargeInPlace(by_messages(group), shared)
    return shared
