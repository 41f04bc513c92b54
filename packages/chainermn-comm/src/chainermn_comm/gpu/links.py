"""Connects ranks for means of gradients on GPUs: NCCL in nodes, NCCL or the host between them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from mpi4py import MPI

from ..errors import CommunicationError, SharedFailure
from ..messaging import ProcessGroup
from ..topology import Topology
from .nccl import NcclCommunicator
from .staged import StagedSum

OPERATION = "connecting GPUs"


@dataclass(frozen=True)
class Links:
    """How a rank reaches others. Only a node's leaders reach other nodes."""

    node: NcclCommunicator | None  # among the node's ranks; None for a rank alone there
    inter: NcclCommunicator | StagedSum | None  # among leaders of one index, a rank of each node
    several_nodes: bool

    @property
    def nccls(self) -> list[NcclCommunicator]:
        """NCCL's communicators of this rank."""
        return [nccl for nccl in (self.node, self.inter) if isinstance(nccl, NcclCommunicator)]


# By its own name, since there is another way where it fails.
connect_leaders = NcclCommunicator


def connect_ranks(
    group: ProcessGroup, topology: Topology, leaders: int, by_nccl: bool = True
) -> Links | None:
    """Connect the ranks of a topology (collective); None if NCCL connects none of them.

    NCCL is used within nodes of more than one rank. Between nodes each node's ``leaders``, at most
    the ranks of the smallest node, exchange equal shards of every chunk: ``by_nccl`` where that can
    be connected, else through host memory.
    """
    comm, rank = group.comm, group.rank
    several = topology.inter_size > 1
    is_leader = several and topology.intra_rank(rank) < leaders
    color = topology.intra_rank(rank) if is_leader else MPI.UNDEFINED
    inter_comm = MPI.Intracomm(comm.Split(color, rank))
    node_comm = MPI.Intracomm(comm.Split(topology.inter_rank(rank), rank))
    nccls: list[NcclCommunicator] = []
    inter: NcclCommunicator | StagedSum | None = None
    try:
        if several and by_nccl:
            inter, why = _connect_nodes(group, inter_comm if is_leader else None)
            nccls += [inter] if inter is not None else []
            if why and rank == 0:
                print(
                    f"ChainerMN: NCCL doesn't connect the nodes ({why}); gradients on GPUs go "
                    "between them through host memory and MPI",
                    file=sys.stderr,
                )
            by_nccl = not why
        if several and not by_nccl and topology.inter_size == comm.size:
            return None
        is_alone = node_comm.size == 1
        node = group.run_on_all_ranks(
            OPERATION, lambda: None if is_alone else NcclCommunicator(node_comm)
        )
        nccls += [node] if node is not None else []
        if several and not by_nccl:
            inter = group.run_on_all_ranks(
                OPERATION, lambda: StagedSum(group, inter_comm.Dup()) if is_leader else None
            )
    except BaseException:
        for nccl in nccls:
            nccl.abort()
        raise
    finally:
        node_comm.Free()
        if is_leader:
            inter_comm.Free()
    return Links(node, inter, several)


def _connect_nodes(
    group: ProcessGroup, inter_comm: MPI.Intracomm | None
) -> tuple[NcclCommunicator | None, str]:
    """Return NCCL's communicator among leaders, or why some have none (collective)."""
    inter, why = None, ""
    with SharedFailure(group.handshake, OPERATION):
        if inter_comm is not None:
            try:
                inter = connect_leaders(inter_comm)
            except CommunicationError as error:
                why = str(error)
    reasons = [row.decode() for row in group.handshake(OPERATION, payload=why.encode()) if row]
    if reasons and inter is not None:
        inter.abort()
    return (None, reasons[0]) if reasons else (inter, "")
