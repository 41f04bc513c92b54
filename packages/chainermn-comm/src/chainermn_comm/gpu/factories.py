"""The algorithms for gradients on GPUs, by the names that the registry uses."""

from __future__ import annotations

from collections.abc import Callable

from .. import devices
from ..allreduce import Algorithm, Factory, NoOp
from ..errors import capture_error
from ..messaging import Context
from ..topology import Topology
from . import nccl
from .device_allreduce import DeviceAllreduce


def mpi(context: Context) -> Algorithm:
    """Through MPI among all ranks; sums in rank order, the same bits as on CPUs."""
    _check_on_all(context, devices.unavailable_reason)
    return DeviceAllreduce(context, Topology(tuple(range(context.size))))


def nccl_only(context: Context) -> Algorithm:
    """Through NCCL among all ranks, whatever their nodes."""
    _check_nccl(context)
    return DeviceAllreduce(context, Topology((0,) * context.size))


def single_leader(context: Context) -> Algorithm:
    """Through NCCL in each node; one rank of each exchanges with other nodes."""
    _check_nccl(context)
    return DeviceAllreduce(context, context.topology)


def single_leader_staged(context: Context) -> Algorithm:
    """The same; between nodes always through host memory, even if MPI is CUDA-aware."""
    _check_nccl(context)
    return DeviceAllreduce(context, context.topology, staged=True)


def multi_leader(context: Context) -> Algorithm:
    """Through NCCL in each node; as many ranks as possible exchange, each a shard."""
    _check_nccl(context)
    nodes = context.topology.nodes
    leaders = min(nodes.count(node) for node in nodes)
    return DeviceAllreduce(context, context.topology, leaders)


def no_op(_: Context) -> Algorithm:
    """No communication at all."""
    return NoOp()


FACTORIES: dict[str, Factory] = {
    factory.__name__: factory
    for factory in (mpi, nccl_only, single_leader, single_leader_staged, multi_leader, no_op)
}


def _check_nccl(context: Context) -> None:
    """Raise on all ranks, before NCCL does, where one can't use it or two share a device."""
    several = context.size > 1
    _check_on_all(context, nccl.unavailable_reason if several else devices.unavailable_reason)
    error = nccl.check_devices(context.comm, context.topology.inter_rank(context.rank))
    if error is not None:
        raise error


def _check_on_all(context: Context, unavailable_reason: Callable[[], str | None]) -> None:
    def check() -> None:
        reason = unavailable_reason()
        if reason is not None:
            raise RuntimeError(
                f"rank {context.rank}: gradients lie on GPUs, which can't be used: {reason}"
            )

    _, error = capture_error(check)
    context.handshake("averaging gradients on GPUs", error=error)
