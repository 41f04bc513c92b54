"""The communicators by which a rank's GPU reaches others: in its node, and between nodes."""

from __future__ import annotations

import sys

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
        leaders: of each node; at most the ranks of the smallest.
        index: this rank's in its node, and that of the shard that it exchanges if it is a leader.
    """

    def __init__(self, topology: Topology, rank: int, leaders: int) -> None:
        """Connect nothing yet (not collective)."""
        self._topology = topology
        self.leaders, self.index = leaders, topology.intra_rank(rank)
        self.several_nodes = topology.inter_size > 1
        self.intra: NcclCommunicator | None = None
        self.inter: NcclCommunicator | StagedSum | None = None

    def connect(self, group: ProcessGroup, by_nccl: bool) -> bool:
        """Connect the ranks (collective); return False if NCCL connects none of them.

        Between nodes that is ``by_nccl`` where it can be, else through host memory.
        """
        comm, rank, several = group.comm, group.rank, self.several_nodes
        leads = several and self.index < self.leaders
        inter_comm = MPI.Intracomm(comm.Split(self.index if leads else MPI.UNDEFINED, rank))
        intra_comm = MPI.Intracomm(comm.Split(self._topology.inter_rank(rank), rank))
        try:
            if several and by_nccl:
                self.inter, why = connect_or_explain(
                    group, OPERATION, lambda: NcclCommunicator(inter_comm) if leads else None
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
            self.intra = group.run_or_raise(
                OPERATION, lambda: NcclCommunicator(intra_comm) if intra_comm.size > 1 else None
            )
            if several and not by_nccl:
                self.inter = group.run_or_raise(
                    OPERATION, lambda: StagedSum(group, inter_comm.Dup()) if leads else None
                )
        finally:
            intra_comm.Free()
            if leads:
                inter_comm.Free()
        return True

    @property
    def nccls(self) -> list[NcclCommunicator]:
        """NCCL's communicators of this rank."""
        return [each for each in (self.intra, self.inter) if isinstance(each, NcclCommunicator)]

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
