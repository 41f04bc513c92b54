"""The backends for arrays on GPUs, by the names that the registry uses."""

from __future__ import annotations

from functools import partial

from ..messaging import BackendFactory, ProcessGroup
from ..sums import FACTORIES as HOST_FACTORIES
from ..sums import Algorithm, HostBackend
from ..topology import Topology
from . import nccl
from .backend import NcclBackend
from .communicators import Communicators
from .device_allreduce import DeviceAllreduce
from .staged import StagedAllreduce


def _staged(group: ProcessGroup, host: str = "bucketed") -> Algorithm:
    name = "rank_ordered" if group.settings.reproducible else host
    return StagedAllreduce(group, HOST_FACTORIES[name])


def _by_nccl(
    group: ProcessGroup,
    nodes: Topology | None = None,
    leaders: int = 1,
    between_nodes: bool = True,
) -> Algorithm:
    """Raise on all ranks, before NCCL does, where one can't use it or two share a device.

    Where it connects no ranks, as each is a node's only one, host memory serves.
    """
    if group.size > 1:
        nccl.check_devices(group)
    communicators = Communicators(nodes or group.topology, group.rank, leaders)
    try:
        if communicators.connect(group, between_nodes):
            return DeviceAllreduce(group, communicators)
        return _staged(group, "single_leader")
    except BaseException:
        communicators.release_local()
        raise


# NCCL for users' arrays among all ranks, and for gradients as the name says.
BACKENDS: dict[str, BackendFactory] = {
    # No NCCL: through host memory and MPI among all ranks.
    "staged": partial(HostBackend, gradients=_staged),
    # NCCL among all ranks, whatever their nodes.
    "nccl": partial(
        NcclBackend,
        gradients=lambda group: _by_nccl(group, Topology((0,) * group.size)),
    ),
    # NCCL in each node; one rank of each exchanges with other nodes.
    "single_leader": partial(NcclBackend, gradients=_by_nccl),
    # The same; between nodes everything goes through host memory and MPI.
    "single_leader_staged": lambda group: (
        NcclBackend if group.topology.inter_size == 1 else HostBackend
    )(group, partial(_by_nccl, between_nodes=False)),
    # NCCL in each node; as many ranks as possible exchange, each a shard.
    "multi_leader": partial(
        NcclBackend,
        gradients=lambda group: _by_nccl(
            group, leaders=group.topology.least_intra_size
        ),
    ),
    "no_op": partial(HostBackend, gradients=HOST_FACTORIES["no_op"]),
}
