"""Which way gradients go that lie on GPUs; the counterpart of `plans`."""

from __future__ import annotations

from collections.abc import Callable

from ..allreduce.plans import Ground, nothing
from ..allreduce.reducer import Reducer
from ..devices import problem
from ..messaging.handshake import Agreement, prepare
from ..topology import Topology
from . import nccl
from .device_stream import DeviceStream

__all__ = ["direct", "many_lanes", "nothing", "one_lane", "one_lane_staged", "through_mpi"]


def through_mpi(ground: Ground) -> Reducer:
    """Through MPI; sums in rank order, the same bits as on CPUs."""
    _agree(ground, problem)
    apart = Topology(tuple(range(ground.comm.size)))
    return DeviceStream(ground.comm, apart, 1, ground.chunk_bytes)


def direct(ground: Ground) -> Reducer:
    """Through NCCL among all ranks, whatever their nodes."""
    _agree_on_nccl(ground)
    together = Topology((0,) * ground.comm.size)
    return DeviceStream(ground.comm, together, 1, ground.chunk_bytes)


def one_lane(ground: Ground) -> Reducer:
    """Through NCCL in each node; one rank of each exchanges with other nodes."""
    _agree_on_nccl(ground)
    return DeviceStream(ground.comm, ground.topology, 1, ground.chunk_bytes)


def one_lane_staged(ground: Ground) -> Reducer:
    """The same; between nodes always through host memory, even if MPI takes GPU memory."""
    _agree_on_nccl(ground)
    return DeviceStream(ground.comm, ground.topology, 1, ground.chunk_bytes, staged=True)


def many_lanes(ground: Ground) -> Reducer:
    """Through NCCL in each node; as many ranks as possible exchange, each a shard."""
    _agree_on_nccl(ground)
    nodes = ground.topology.nodes
    lanes = min(nodes.count(node) for node in nodes)
    return DeviceStream(ground.comm, ground.topology, lanes, ground.chunk_bytes)


def _agree_on_nccl(ground: Ground) -> None:
    """Raise on all ranks, before NCCL does, where one can't use it or two share a device."""
    _agree(ground, nccl.problem if ground.comm.size > 1 else problem)
    wrong = nccl.check_devices(ground.comm, ground.topology.inter_rank(ground.comm.rank))
    if wrong is not None:
        raise wrong


def _agree(ground: Ground, find: Callable[[], str | None]) -> None:
    def check() -> None:
        why = find()
        if why is not None:
            raise RuntimeError(
                f"rank {ground.comm.rank}: gradients lie on GPUs, which can't be used: {why}"
            )

    _, found = prepare(check)
    Agreement(ground.comm)("averaging gradients on GPUs", problem=found)
