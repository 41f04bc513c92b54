"""How a rank's GPU reaches others for means of gradients: in its node, and between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from ..gpu import NcclCommunicator, devices, nccl
from ..messaging import ProcessGroup
from ..topology import Topology
from .staged_sum import StagedSum


@dataclass
class NcclGroups:
    """The connections of one rank.

    Between nodes a chunk has one shard for each leader of a node. A leader sums its
    shard with the leaders of the same index on other nodes.
    """

    # Among the node's ranks; None for a rank alone there.
    intra: NcclCommunicator | None = None
    # Among leaders of one index; None for other ranks, and on a single node.
    inter: NcclCommunicator | StagedSum | None = None
    several_nodes: bool = False
    shards: int = 1
    index: int = 0  # of this rank in its node, and of its shard if it is a leader

    @property
    def nccls(self) -> list[NcclCommunicator]:
        """NCCL's communicators of this rank."""
        found = (self.intra, self.inter)
        return [each for each in found if isinstance(each, NcclCommunicator)]

    def sum_in_place(self, buffer: Any, size: int) -> None:
        """Overwrite the first ``size`` elements by their sums, on the current stream (collective).

        ``buffer`` has a multiple of ``shards`` elements. What pads the last shard is not
        summed between nodes.
        """
        if not self.several_nodes:
            if self.intra is not None:
                self.intra.sum_in_place(buffer)
            return
        if self.intra is not None:
            self.intra.reduce_shards(buffer, self.shards)
        length = buffer.size // self.shards
        start = self.index * length
        stop = min(start + length, size)
        if self.inter is not None and start < stop:
            self.inter.sum_in_place(buffer[start:stop])
        if self.intra is not None:
            self.intra.gather_shards(buffer, self.shards)

    def close(self) -> None:
        """Release everything; all work must be over (collective)."""
        for each in (self.intra, self.inter):
            if each is not None:
                each.close()

    def release_local(self) -> None:
        """Release what needs no other rank; NCCL has been aborted (not collective)."""
        if isinstance(self.inter, StagedSum):
            self.inter.release_local()


def connect_groups(
    group: ProcessGroup, nodes: Topology, leaders: int, staged: bool
) -> NcclGroups:
    """Connect the ranks, which are on several nodes (collective).

    A node has at least as many ranks as ``leaders``. Between nodes chunks go through
    NCCL, or through host memory where that is ``staged``.
    """
    index = nodes.intra_rank(group.rank)
    leads = index < leaders
    groups = NcclGroups(several_nodes=True, shards=leaders, index=index)
    operation = "connecting GPUs by NCCL"
    group.handshake.begin(operation)
    with group.call(operation):  # the job ends where a rank can't be connected
        node = _split(group.comm, nodes.inter_rank(group.rank))
        across = _split(group.comm, index if leads else MPI.UNDEFINED)
        if node.size > 1:
            groups.intra = NcclCommunicator(node)
        if leads and staged:
            groups.inter = StagedSum.between_nodes(across.Dup(), group)
        elif leads:
            groups.inter = NcclCommunicator(across)
        node.Free()
        if leads:
            across.Free()
    return groups


def check_devices(group: ProcessGroup) -> None:
    """Raise on all ranks where NCCL can't serve, or two of a node share a device (collective)."""
    operation = "asking which device this is"

    node = group.topology.inter_rank(group.rank)
    with group.together(operation) as meeting:
        reason = nccl.unavailable_reason()
        if reason is not None:
            raise RuntimeError(nccl_is_missing(group.rank, reason))
        meeting.payload = f"{node} {devices.bus_id()}".encode()
    with group.together(operation):
        _refuse_sharing(meeting.payloads)


def nccl_is_missing(rank: int, reason: str) -> str:
    """Return the text of the error of a rank that can't use NCCL."""
    return (
        f"rank {rank}: this communicator moves arrays on GPUs by NCCL, and {reason}; "
        "communicator 'flat' needs no NCCL"
    )


def _refuse_sharing(devices_of_ranks: list[bytes]) -> None:
    """Raise ValueError if two ranks have the same node and PCI bus id."""
    ranks_of: dict[bytes, list[int]] = {}
    for rank, device in enumerate(devices_of_ranks):
        ranks_of.setdefault(device, []).append(rank)
    shared = [
        f"ranks {ranks} use device {device.decode().partition(' ')[2]}"
        for device, ranks in ranks_of.items()
        if len(ranks) > 1
    ]
    if shared:
        raise ValueError(
            f"{'; '.join(shared)}: NCCL wants one device a rank; call "
            "chainer.backends.cuda.get_device_from_id(comm.intra_rank).use() before the first "
            "gradients, with no more ranks on a node than it has devices"
        )


def _split(comm: MPI.Intracomm, color: int) -> MPI.Intracomm:
    return MPI.Intracomm(comm.Split(color, comm.rank))
