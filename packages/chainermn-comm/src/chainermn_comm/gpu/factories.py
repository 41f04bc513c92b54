"""The algorithms for gradients on GPUs, by the names that the registry uses."""

from __future__ import annotations

from collections.abc import Callable

from .. import devices
from ..allreduce import FACTORIES as HOST_FACTORIES
from ..allreduce import Algorithm, Factory
from ..messaging import Context
from ..topology import Topology
from . import nccl
from .backend import NcclBackend
from .device_allreduce import DeviceAllreduce


def _through_mpi(context: Context) -> Algorithm:
    _check_on_all_ranks(context, devices.unavailable_reason)
    return DeviceAllreduce(context, Topology(tuple(range(context.size))), between="mpi")


def _through_nccl(
    context: Context, topology: Topology, leaders: int = 1, between: str = "nccl"
) -> Algorithm:
    """Raise on all ranks, before NCCL does, where one can't use it or two share a device."""
    several = context.size > 1
    _check_on_all_ranks(context, nccl.unavailable_reason if several else devices.unavailable_reason)
    nccl.check_devices(context)
    return DeviceAllreduce(context, topology, leaders, between)


def _check_on_all_ranks(context: Context, unavailable_reason: Callable[[], str | None]) -> None:
    def check() -> None:
        reason = unavailable_reason()
        if reason is not None:
            raise RuntimeError(
                f"rank {context.rank}: gradients lie on GPUs, which can't be used: {reason}"
            )

    context.run_on_all_ranks("averaging gradients on GPUs", check)


FACTORIES: dict[str, Factory] = {
    # MPI among all ranks; sums in rank order, the same bits as on CPUs.
    "mpi": _through_mpi,
    # NCCL among all ranks, whatever their nodes.
    "nccl_only": lambda context: _through_nccl(context, Topology((0,) * context.size)),
    # NCCL in each node; one rank of each exchanges with other nodes, by NCCL too where it can.
    "single_leader": lambda context: _through_nccl(context, context.topology),
    # The same; between nodes always through host memory and MPI.
    "single_leader_staged": lambda context: _through_nccl(context, context.topology, between="mpi"),
    # NCCL in each node; as many ranks as possible exchange, each a shard.
    "multi_leader": lambda context: _through_nccl(
        context, context.topology, context.topology.least_intra_size
    ),
    "no_op": HOST_FACTORIES["no_op"],
}


def backend_for(factory: Factory, context: Context) -> NcclBackend | None:
    """Return what moves users' arrays, where NCCL also takes all gradients of this factory's."""
    by_mpi = ["mpi", "no_op"] + ["single_leader_staged"] * (context.topology.inter_size > 1)
    return None if factory in [FACTORIES[name] for name in by_mpi] else NcclBackend(context)
