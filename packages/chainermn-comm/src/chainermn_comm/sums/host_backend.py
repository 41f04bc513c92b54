"""Arrays in host memory: moved by MPI, and summed in shared memory where ranks have some."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest

import numpy as np
from mpi4py import MPI

from ..layout import Arrays, Operand
from ..messaging import (
    Backend,
    MakeSum,
    Parts,
    ProcessGroup,
    bcast_buffer,
    bcast_in_parts,
    messages,
    start_exchange,
)
from ..numbers import as_bytes
from .factories import multi_leader, per_tensor, rank_ordered, single_leader
from .pairwise import reduce_scatter

_EMPTY = np.empty(0, np.uint8)
# From here on MPI's own broadcast among more than two ranks of a machine takes up to
# twice as long; see docs/decisions/messages.md.
IN_PARTS_BYTES = 8 << 20


class HostBackend(Backend):
    """Messages of MPI and shared memory; also for arrays that are copied from GPUs to the host."""

    def __init__(self, group: ProcessGroup, make_gradient_sum: MakeSum) -> None:
        super().__init__(group, make_gradient_sum)
        on_one_node = group.topology.inter_size == 1
        leaders = (single_leader, multi_leader)
        self.is_local = on_one_node and make_gradient_sum in leaders
        self._sums_in_memory = self.is_local or (
            on_one_node and make_gradient_sum is rank_ordered
        )
        # For the size of chunks, a setting.
        self._by_messages = lru_cache(1)(lambda _: per_tensor(group))

    def allreduce(self, operand: Operand) -> None:
        if self._sums_in_memory:
            self.gradient_sum().allreduce(operand)
        else:
            self._by_messages(self.group.settings.chunk_bytes).allreduce(operand)

    def reduce_scatter(
        self, rows: Sequence[Arrays], targets: Arrays, op: np.ufunc
    ) -> None:
        rows = [[array.reshape(-1) for array in row] for row in rows]
        # A value may be several arrays; the i-th of all ranks travel together.
        for sources, target in zip_longest(
            zip_longest(*rows, fillvalue=_EMPTY), targets
        ):
            into = _EMPTY
            if target is not None:
                into = target.reshape(-1)
            reduce_scatter(self.group.comm, self.group.tag, sources, into, op)

    def allocate(self, header: bytes) -> messages.Message:
        return messages.allocate(header)

    def exchange(self, outgoing: Parts, incoming: Parts) -> None:
        sent = [(rank, as_bytes(array)) for rank, array in outgoing]
        received = [(rank, as_bytes(array)) for rank, array in incoming]
        requests = start_exchange(self.group.comm, sent, received, self.group.tag)
        MPI.Request.Waitall(requests)

    def broadcast(self, parts: Parts) -> None:
        comm = self.group.comm
        is_one_node = self.group.topology.inter_size == 1
        for root, array in parts:
            is_large = array.nbytes >= IN_PARTS_BYTES
            if is_large and comm.size > 2 and is_one_node:
                bcast_in_parts(comm, as_bytes(array), root, self.group.tag)
            else:
                bcast_buffer(comm, as_bytes(array), root)
