"""The algorithms for gradients on GPUs, by the names that the registry uses."""

from __future__ import annotations

import sys
from collections.abc import Callable

from .. import devices
from ..allreduce import FACTORIES as HOST_FACTORIES
from ..allreduce import Algorithm, Factory
from ..messaging import Context
from ..topology import Topology
from . import nccl
from .backend import NcclBackend
from .device_allreduce import DeviceAllreduce
from .links import connect_ranks
from .staged import OPERATION, StagedAllreduce


def _staged(context: Context, host: str = "bucketed") -> Algorithm:
    _check_on_all_ranks(context, devices.unavailable_reason)
    name = "rank_ordered" if context.reproducible else host
    return StagedAllreduce(context, HOST_FACTORIES[name])


def _by_nccl(context: Context, topology: Topology, leaders: int = 1, host: str = "") -> Algorithm:
    """Raise on all ranks, before NCCL does, where one can't use it or two share a device.

    Where it doesn't connect nodes, that ``host`` algorithm serves.
    """
    several = context.size > 1
    _check_on_all_ranks(context, nccl.unavailable_reason if several else devices.unavailable_reason)
    nccl.check_devices(context)
    with context.in_step(OPERATION):
        links = connect_ranks(context, topology, leaders)
    if not isinstance(links, str):
        try:
            return DeviceAllreduce(context, topology, leaders, links)
        except BaseException:
            nccl.abort_all(links.nccls)
            raise
    if context.rank == 0:
        print(
            f"ChainerMN: NCCL doesn't connect the nodes ({links}); gradients on GPUs go through "
            "host memory and MPI",
            file=sys.stderr,
        )
    return _staged(context, host)


def _without_nccl_between_nodes(context: Context) -> Algorithm:
    if context.topology.inter_size > 1:
        return _staged(context, "single_leader")
    return _by_nccl(context, context.topology)


def _check_on_all_ranks(context: Context, unavailable_reason: Callable[[], str | None]) -> None:
    def check() -> None:
        reason = unavailable_reason()
        if reason is not None:
            raise RuntimeError(
                f"rank {context.rank}: gradients lie on GPUs, which can't be used: {reason}"
            )

    context.run_on_all_ranks(OPERATION, check)


FACTORIES: dict[str, Factory] = {
    # Through host memory and MPI among all ranks; the same bits as on CPUs.
    "mpi": _staged,
    # NCCL among all ranks, whatever their nodes.
    "nccl_only": lambda context: _by_nccl(context, Topology((0,) * context.size)),
    # NCCL in each node; one rank of each exchanges with other nodes.
    "single_leader": lambda context: _by_nccl(context, context.topology, 1, "single_leader"),
    # The same on one node; on several always through host memory and MPI.
    "single_leader_staged": _without_nccl_between_nodes,
    # NCCL in each node; as many ranks as possible exchange, each a shard.
    "multi_leader": lambda context: _by_nccl(
        context, context.topology, context.topology.least_intra_size, "multi_leader"
    ),
    "no_op": HOST_FACTORIES["no_op"],
}


def backend_for(factory: Factory, context: Context) -> NcclBackend | None:
    """Return what moves users' arrays, where NCCL also takes all gradients of this factory's."""
    by_mpi = ["mpi", "no_op"] + ["single_leader_staged"] * (context.topology.inter_size > 1)
    return None if factory in [FACTORIES[name] for name in by_mpi] else NcclBackend(context)
