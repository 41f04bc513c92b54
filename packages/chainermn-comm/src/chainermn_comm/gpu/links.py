"""Connects ranks for means of gradients on GPUs: NCCL in nodes, NCCL or MPI between them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from mpi4py import MPI

from ..errors import CommunicationError, SharedFailure
from ..messaging import Context
from ..topology import Topology
from .inter_node import MpiExchange
from .nccl import NcclCommunicator

OPERATION = "connecting GPUs"


@dataclass(frozen=True)
class Links:
    """How a rank reaches others. Only a node's leaders reach other nodes."""

    node: NcclCommunicator | None  # among the node's ranks; None for a rank alone there
    inter: NcclCommunicator | None  # among the leaders of one index, a rank of each node
    exchange: MpiExchange | None  # the same by MPI
    several_nodes: bool
    all_by_nccl: bool  # MPI takes no sums, on any rank
    nccl_sums: bool  # so that numbers are divided before; else MPI's are divided after
    inter_comm: MPI.Intracomm

    def free(self) -> None:
        """Free MPI's communicator (collective among leaders of one index)."""
        if self.inter_comm != MPI.COMM_NULL:
            self.inter_comm.Free()


# By its own name, since MPI serves where it fails.
connect_leaders = NcclCommunicator


def connect_ranks(
    context: Context, topology: Topology, leaders: int, between: str, slots: int
) -> Links:
    """Connect the ranks of a topology (collective).

    NCCL is used within nodes of more than one rank. Between nodes each node's ``leaders``, at most
    the ranks of the smallest node, exchange equal shards of every chunk: through NCCL where
    ``between`` is ``"nccl"`` and it can be connected; else through host memory and MPI, at most
    ``slots`` chunks at a time.
    """
    comm, rank = context.comm, context.rank
    several = topology.inter_size > 1
    is_leader = several and topology.intra_rank(rank) < leaders
    color = topology.intra_rank(rank) if is_leader else MPI.UNDEFINED
    inter_comm = MPI.Intracomm(comm.Split(color, rank))
    node_comm = MPI.Intracomm(comm.Split(topology.inter_rank(rank), rank))
    made: list[NcclCommunicator] = []

    def make(of: MPI.Intracomm) -> NcclCommunicator:
        made.append(NcclCommunicator(of))
        return made[-1]

    try:
        node = context.run_on_all_ranks(
            OPERATION, lambda: make(node_comm) if node_comm.size > 1 else None
        )
        inter, why = None, ""
        if several and between == "nccl":
            inter, why = _connect_nodes(context, inter_comm if is_leader else None)
        exchange, by_mpi = None, several and (between != "nccl" or bool(why))
        if by_mpi:
            exchange = context.run_on_all_ranks(
                OPERATION, lambda: MpiExchange(inter_comm, slots) if is_leader else None, "by MPI"
            )
            if why and rank == 0:
                print(
                    f"ChainerMN: NCCL doesn't connect the nodes ({why}); gradients on GPUs go "
                    "between them through host memory and MPI",
                    file=sys.stderr,
                )
    except BaseException:
        for nccl in made:
            nccl.abort()
        if inter_comm != MPI.COMM_NULL:
            inter_comm.Free()
        raise
    finally:
        node_comm.Free()
    in_nodes = topology.inter_size < topology.size  # some node has more than one rank
    nccl_sums = in_nodes or (several and not by_mpi)
    return Links(node, inter, exchange, several, not by_mpi, nccl_sums, inter_comm)


def _connect_nodes(
    context: Context, inter_comm: MPI.Intracomm | None
) -> tuple[NcclCommunicator | None, str]:
    """Return NCCL's communicator among leaders, or why some have none (collective)."""
    inter, why = None, ""
    with SharedFailure(context.handshake, OPERATION):
        if inter_comm is not None:
            try:
                inter = connect_leaders(inter_comm)
            except CommunicationError as error:
                why = str(error)
    reasons = [row.decode() for row in context.handshake(OPERATION, payload=why.encode()) if row]
    if reasons and inter is not None:
        inter.abort()
    return (None, reasons[0]) if reasons else (inter, "")
