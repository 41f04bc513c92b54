"""The communicators by which a rank's GPU reaches others: in its node, and between nodes."""

from __future__ import annotations

import sys
from typing import Any

from mpi4py import MPI

from ..messaging import ProcessGroup
from ..topology import Topology
from .nccl import NcclCommunicator, abort_all, connect_or_explain
from .staged import StagedSum

OPERATION = "connecting GPUs"


class Communicators:
    """NCCL in each node; between nodes NCCL or host memory.

    Only a node's leaders reach other nodes. They exchange equal shards of every chunk.

    Attributes:
        intra: among the node's ranks; None for a rank alone there.
        inter: among leaders of one index, a rank of each node; None for other ranks.
        shards: equal ones of every chunk, one for each leader of a node; one on a single node.
    """

    def __init__(self, topology: Topology, rank: int, leaders: int) -> None:
        """Connect nothing yet (not collective); a node has at least as many ranks as leaders."""
        self._topology, self._index = topology, topology.intra_rank(rank)
        self._several_nodes = topology.inter_size > 1
        self.shards = leaders if self._several_nodes else 1
        self.intra: NcclCommunicator | None = None
        self.inter: NcclCommunicator | StagedSum | None = None

    def connect(self, group: ProcessGroup, by_nccl: bool) -> bool:
        """Connect the ranks (collective); return False if NCCL connects none of them.

        Between nodes that is ``by_nccl`` where it can be, else through host memory.
        """
        comm, rank, several = group.comm, group.rank, self._several_nodes
        leads = several and self._index < self.shards
        inter_comm = MPI.Intracomm(
            comm.Split(self._index if leads else MPI.UNDEFINED, rank)
        )
        intra_comm = MPI.Intracomm(comm.Split(self._topology.inter_rank(rank), rank))

        def connect_node() -> None:  # if other nodes fail, it is aborted here
            self.intra = NcclCommunicator(intra_comm) if intra_comm.size > 1 else None

        try:
            if several and by_nccl:
                self.inter, why = connect_or_explain(
                    group,
                    OPERATION,
                    lambda: NcclCommunicator(inter_comm) if leads else None,
                )
                if why and rank == 0:
                    print(
                        f"ChainerMN: NCCL doesn't connect the nodes ({why}); gradients on GPUs go "
                        "between them through host memory and MPI",
                        file=sys.stderr,
                    )
                by_nccl = not why
            if several and not by_nccl and self._topology.inter_size == comm.size:
                return False
            with group.together(OPERATION):
                connect_node()
            if several and not by_nccl:
                with group.together(OPERATION):
                    self.inter = StagedSum(group, inter_comm.Dup()) if leads else None
        finally:
            intra_comm.Free()
            if leads:
                inter_comm.Free()
        return True

    def sum_in_place(self, buffer: Any, size: int, stream: Any) -> None:
        """Overwrite the first ``size`` elements by their sums, in the stream's order (collective).

        ``buffer`` is a multiple of ``shards`` elements: each shard is summed on one of
        the node's ranks, then between nodes, and copied to all. What pads the last one
        is left out.
        """
        if not self._several_nodes:
            if self.intra is not None:
                self.intra.sum_in_place(buffer, stream)
            return
        if self.intra is not None:
            self.intra.reduce_shards(buffer, self.shards, stream)
        length = buffer.size // self.shards
        start = self._index * length
        if self.inter is not None and start < size:
            self.inter.sum_in_place(buffer[start : min(start + length, size)], stream)
        if self.intra is not None:
            self.intra.gather_shards(buffer, self.shards, stream)

    @property
    def nccls(self) -> list[NcclCommunicator]:
        """NCCL's communicators of this rank."""
        return [
            each
            for each in (self.intra, self.inter)
            if isinstance(each, NcclCommunicator)
        ]

    def close(self) -> None:
        """Release everything; all work must be over (collective)."""
        for each in (self.intra, self.inter):
            if each is not None:
                each.close()

    def release_local(self) -> None:
        """Release what needs no other rank; NCCL is aborted (not collective)."""
        abort_all(self.nccls)
        if isinstance(self.inter, StagedSum):
            self.inter.release_local()
