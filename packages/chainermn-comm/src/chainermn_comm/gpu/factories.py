"""The algorithms for gradients on GPUs: functions that make one for a group's topology."""

from __future__ import annotations

from .. import sums
from ..messaging import Algorithm, ProcessGroup
from ..topology import Topology
from . import nccl
from .communicators import Communicators
from .device_allreduce import DeviceAllreduce
from .staged import StagedAllreduce


def staged_sum(group: ProcessGroup) -> Algorithm:
    """No NCCL: through host memory and MPI among all ranks."""
    if group.settings.reproducible:
        return StagedAllreduce(group, sums.rank_ordered)
    return StagedAllreduce(group, sums.packed)


def nccl_everywhere(group: ProcessGroup) -> Algorithm:
    """NCCL among all ranks, whatever their nodes."""
    return _by_nccl(group, Topology((0,) * group.size))


def nccl_single_leader(group: ProcessGroup) -> Algorithm:
    """NCCL in each node; one rank of each exchanges with other nodes."""
    return _by_nccl(group, group.topology)


def nccl_multi_leader(group: ProcessGroup) -> Algorithm:
    """NCCL in each node; as many ranks as possible exchange, each a shard."""
    return _by_nccl(group, group.topology, group.topology.least_intra_size)


def nccl_in_nodes(group: ProcessGroup) -> Algorithm:
    """NCCL in each node; between nodes everything goes through host memory and MPI."""
    return _by_nccl(group, group.topology, between_nodes=False)


def _by_nccl(
    group: ProcessGroup,
    nodes: Topology,
    leaders: int = 1,
    between_nodes: bool = True,
) -> Algorithm:
    """Raise on all ranks, before NCCL does, where one can't use it or two share a device.

    Where it connects no ranks, as each is a node's only one, host memory serves.
    """
    if group.size > 1:
        nccl.check_devices(group)
    communicators = Communicators(nodes, group.rank, leaders)
    try:
        # Ranks connect together: what one of them alone raises ends the job.
        with group.call("connecting GPUs"):
            if communicators.connect(group, between_nodes):
                return DeviceAllreduce(group, communicators)
        return StagedAllreduce(group, sums.single_leader)
    except BaseException:
        communicators.release_local()
        raise
