"""The algorithms for gradients on GPUs, by the names that the registry uses."""

from __future__ import annotations

from collections.abc import Callable

from .. import devices
from ..allreduce import FACTORIES as HOST_FACTORIES
from ..allreduce import Algorithm, Factory
from ..messaging import Context
from ..topology import Topology
from . import nccl
from .device_allreduce import DeviceAllreduce


def mpi(context: Context) -> Algorithm:
    """Through MPI among all ranks; sums in rank order, the same bits as on CPUs."""
    _check_on_all_ranks(context, devices.unavailable_reason)
    return DeviceAllreduce(context, Topology(tuple(range(context.size))))


def nccl_only(context: Context) -> Algorithm:
    """Through NCCL among all ranks, whatever their nodes."""
    return _through_nccl(context, Topology((0,) * context.size))


def single_leader(context: Context) -> Algorithm:
    """Through NCCL in each node; one rank of each exchanges with other nodes."""
    return _through_nccl(context, context.topology)


def single_leader_staged(context: Context) -> Algorithm:
    """The same; between nodes always through host memory, even if MPI is CUDA-aware."""
    return _through_nccl(context, context.topology, staged=True)


def multi_leader(context: Context) -> Algorithm:
    """Through NCCL in each node; as many ranks as possible exchange, each a shard."""
    nodes = context.topology.nodes
    return _through_nccl(context, context.topology, min(map(nodes.count, nodes)))


FACTORIES: dict[str, Factory] = {
    factory.__name__: factory
    for factory in (mpi, nccl_only, single_leader, single_leader_staged, multi_leader)
} | {"no_op": HOST_FACTORIES["no_op"]}


def _through_nccl(
    context: Context, topology: Topology, leaders: int = 1, staged: bool = False
) -> Algorithm:
    """Raise on all ranks, before NCCL does, where one can't use it or two share a device."""
    several = context.size > 1
    _check_on_all_ranks(context, nccl.unavailable_reason if several else devices.unavailable_reason)
    nccl.check_devices(context.comm, context.topology.inter_rank(context.rank))
    return DeviceAllreduce(context, topology, leaders, staged)


def _check_on_all_ranks(context: Context, unavailable_reason: Callable[[], str | None]) -> None:
    def check() -> None:
        reason = unavailable_reason()
        if reason is not None:
            raise RuntimeError(
                f"rank {context.rank}: gradients lie on GPUs, which can't be used: {reason}"
            )

    context.handshake.run_on_all_ranks("averaging gradients on GPUs", check)
