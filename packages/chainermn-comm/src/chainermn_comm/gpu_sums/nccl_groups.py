"""How a rank's GPU reaches other GPUs for means: in its node, and between nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mpi4py import MPI

from ..gpu import NcclCommunicator, devices, nccl
from ..layout import shard_slice
from ..messaging import ProcessGroup
from ..sums import packed
from ..topology import Topology
from .staged_sum import StagedSum


@dataclass
class NcclGroups:
    """The communicators by which one rank sums in two steps: within its node, and across nodes.

    A chunk has one shard for each leader of a node. A leader sums its shard with the
    leaders of the same index on other nodes. If all ranks sum at once, each rank is the
    leader of its own node.
    """

    # Connects the node's ranks; None if the node has one rank.
    within: NcclCommunicator | None = None
    # Connects leaders with the same index; None for other ranks.
    across: NcclCommunicator | StagedSum | None = None
    leaders: int = 1
    index: int = 0  # of this rank in its node, and of its shard if it is a leader
    # Used by a StagedSum for sums across nodes.
    comm: MPI.Intracomm | None = None

    def sum_in_place(self, buffer: Any) -> None:
        """Overwrite ``buffer`` by its sum over ranks, on the current stream (collective)."""
        shards = [
            buffer[shard_slice(buffer.size, self.leaders, index)]
            for index in range(self.leaders)
        ]
        own = None
        if self.index < self.leaders:
            own = shards[self.index]
        if self.within is not None:
            self.within.reduce(shards, own, np.add)
        if self.across is not None:
            self.across.sum_in_place(own)
        if self.within is not None:
            self.within.broadcast(enumerate(shards))

    def close(self) -> None:
        """Release the sum through host memory and its communicator (collective)."""
        if self.comm is not None:
            self.comm.Free()


def connect_groups(
    group: ProcessGroup, nodes: Topology, leaders: int, staged: bool
) -> NcclGroups:
    """Connect the ranks, which are on several nodes (collective).

    A node has at least as many ranks as ``leaders``. Between nodes chunks go through
    NCCL, or with ``staged`` through host memory.
    """
    index = nodes.intra_rank(group.rank)
    groups = NcclGroups(leaders=leaders, index=index)
    with connecting(group):
        node = _split(group.comm, nodes.inter_rank(group.rank))
        if node.size > 1:
            groups.within = NcclCommunicator(node)
        node.Free()
        across = _split(group.comm, index if index < leaders else MPI.UNDEFINED)
        if across != MPI.COMM_NULL and staged:
            alone = Topology(tuple(range(across.size)))
            part = replace(group, comm=across, topology=alone)
            groups.across = StagedSum(part, packed)
            groups.comm = across
        elif across != MPI.COMM_NULL:
            groups.across = NcclCommunicator(across)
            across.Free()
    return groups


@contextmanager
def connecting(group: ProcessGroup) -> Iterator[None]:
    """Connect devices inside (collective); the job ends if a rank can't be connected."""
    operation = "connecting GPUs by NCCL"
    group.handshake.begin(operation)
    with group.call(operation):
        yield


def check_devices(group: ProcessGroup) -> None:
    """Raise on all ranks if NCCL can't be used, or two ranks share a device (collective)."""
    node = group.topology.inter_rank(group.rank)
    with group.together("asking which device this is") as call:
        reason = nccl.unavailable_reason()
        if reason is not None:
            raise RuntimeError(
                f"rank {group.rank}: this communicator moves arrays on GPUs by NCCL, and "
                f"{reason}; communicator 'flat' needs no NCCL"
            )
        call.payload = f"{node} {devices.bus_id()}".encode()
    ranks_of: dict[bytes, list[int]] = {}
    for rank, device in enumerate(call.payloads):
        ranks_of.setdefault(device, []).append(rank)
    shared = [
        f"ranks {ranks} use device {device.decode().partition(' ')[2]}"
        for device, ranks in ranks_of.items()
        if len(ranks) > 1
    ]
    if shared:
        error = ValueError(
            f"{'; '.join(shared)}: NCCL wants one device a rank; call "
            "chainer.backends.cuda.get_device_from_id(comm.intra_rank).use() before the first "
            "gradients, with no more ranks on a node than it has devices"
        )
        raise group.handshake.raised_on_all(error)


def _split(comm: MPI.Intracomm, color: int) -> MPI.Intracomm:
    return MPI.Intracomm(comm.Split(color, comm.rank))
