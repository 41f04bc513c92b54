"""What serves arrays on GPUs, by the names that the registry uses."""

from __future__ import annotations

from functools import partial

from ..allreduce import FACTORIES as HOST_FACTORIES
from ..allreduce import Algorithm, Factory
from ..messaging import BackendFactory, ProcessGroup
from ..topology import Topology
from . import nccl
from .backend import NcclBackend
from .communicators import Communicators
from .device_allreduce import DeviceAllreduce
from .staged import OPERATION, StagedAllreduce


def _staged(group: ProcessGroup, host: str = "bucketed") -> Algorithm:
    name = "rank_ordered" if group.settings.reproducible else host
    return StagedAllreduce(group, HOST_FACTORIES[name])


def _by_nccl(
    group: ProcessGroup, topology: Topology, leaders: int = 1, between_nodes: bool = True
) -> Algorithm:
    """Raise on all ranks, before NCCL does, where one can't use it or two share a device.

    Where it connects no ranks, as each is a node's only one, host memory serves.
    """
    if group.size > 1:
        group.run_or_raise(OPERATION, partial(_check_nccl, group.rank))
        nccl.check_devices(group)
    communicators = Communicators(topology, group.rank, leaders)
    try:
        with group.in_step(OPERATION):
            if communicators.connect(group, between_nodes):
                return DeviceAllreduce(group, communicators)
            return _staged(group, "single_leader")
    except BaseException:
        communicators.release_local()
        raise


def _check_nccl(rank: int) -> None:
    reason = nccl.unavailable_reason()
    if reason is not None:
        raise RuntimeError(f"rank {rank}: NCCL can't take gradients on GPUs: {reason}")


FACTORIES: dict[str, Factory] = {
    # Through host memory and MPI among all ranks.
    "mpi": _staged,
    # NCCL among all ranks, whatever their nodes.
    "nccl_only": lambda group: _by_nccl(group, Topology((0,) * group.size)),
    # NCCL in each node; one rank of each exchanges with other nodes.
    "single_leader": lambda group: _by_nccl(group, group.topology),
    # The same; between nodes always through host memory and MPI.
    "single_leader_staged": lambda group: _by_nccl(group, group.topology, between_nodes=False),
    # NCCL in each node; as many ranks as possible exchange, each a shard.
    "multi_leader": lambda group: _by_nccl(group, group.topology, group.topology.least_intra_size),
    "no_op": HOST_FACTORIES["no_op"],
}


BACKENDS: dict[str, BackendFactory] = {
    "none": lambda _: None,
    "nccl": NcclBackend,
    # Between nodes gradients go through host memory, too.
    "nccl_on_one_node": lambda group: (
        NcclBackend(group) if group.topology.inter_size == 1 else None
    ),
}
