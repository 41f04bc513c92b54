"""Arrays in host memory: moved by MPI, and summed in shared memory if possible."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ..layout import Arrays, Operand
from ..messaging import (
    Backend,
    MakeSum,
    Parts,
    ProcessGroup,
    bcast_buffer,
    messages,
    start_exchange,
)
from ..numbers import as_bytes
from .factories import multi_leader, per_tensor, rank_ordered, single_leader
from .pairwise import reduce_scatter

# From this size on, MPI's own broadcast among more than two ranks of a machine takes up
# to twice as long as a broadcast in parts.
IN_PARTS_BYTES = 8 << 20


class HostBackend(Backend):
    """Messages of MPI and shared memory; also for arrays that are copied from GPUs to the host."""

    def __init__(self, group: ProcessGroup, make_gradient_sum: MakeSum) -> None:
        super().__init__(group, make_gradient_sum)
        on_one_node = group.topology.inter_size == 1
        leaders = (single_leader, multi_leader)
        self.is_local = on_one_node and make_gradient_sum in leaders
        in_memory = (*leaders, rank_ordered)
        self._sums_in_memory = on_one_node and make_gradient_sum in in_memory

    def allreduce(self, operand: Operand) -> None:
        if self._sums_in_memory:
            algorithm = self.gradient_sum()
        else:
            if self.made_array_sum is None:
                self.made_array_sum = per_tensor(self.group)
            algorithm = self.made_array_sum
        algorithm.allreduce(operand)

    def reduce_scatter(self, sources: Arrays, target: np.ndarray, op: np.ufunc) -> None:
        flat = [source.reshape(-1) for source in sources]
        reduce_scatter(self.group.comm, self.group.tag, flat, target.reshape(-1), op)

    def allocate(self, header: bytes) -> messages.Message:
        return messages.allocate(header)

    def exchange(self, outgoing: Parts, incoming: Parts) -> None:
        sent = [(rank, as_bytes(array)) for rank, array in outgoing]
        received = [(rank, as_bytes(array)) for rank, array in incoming]
        requests = start_exchange(self.group.comm, sent, received, self.group.tag)
        MPI.Request.Waitall(requests)

    def broadcast(self, parts: Parts) -> None:
        group = self.group
        is_on_one_node = group.topology.inter_size == 1
        for root, array in parts:
            if is_on_one_node and group.size > 2 and array.nbytes >= IN_PARTS_BYTES:
                self._broadcast_in_parts(root, as_bytes(array))
            else:
                bcast_buffer(group.comm, as_bytes(array), root)

    def _broadcast_in_parts(self, root: int, buffer: np.ndarray) -> None:
        """Send each rank a part, which that rank sends to the others (collective).

        Scatter and collect of M. Barnett et al., "Building a High-Performance
        Collective Communication Library", 1994.
        """
        group = self.group
        parts = list(enumerate(np.array_split(buffer, group.size)))
        own = parts[group.rank][1]
        copies = [(rank, own) for rank in range(group.size) if rank != root]
        if group.rank == root:
            self.exchange(parts + copies, [])
        else:
            self.exchange([], [(root, own)])
            self.exchange(copies, parts)
