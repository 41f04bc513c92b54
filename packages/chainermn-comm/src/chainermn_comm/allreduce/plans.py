"""Which way gradients go: each plan makes the reducer of a communicator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from mpi4py import MPI

from ..faults.abort import abort_if_desynchronized
from ..topology import Topology
from .autotuner import Fastest
from .hierarchical import NetworkStream
from .pairwise import InPlace
from .reducer import BySize, Direct, Nothing, Reducer
from .shared_memory import NodeStream
from .shared_window import NoSharedMemory
from .transport import Transport

# For ranks whose cores share little; see `Transport.allreduce`.
LAG = 2
# In a node, arrays of this size and more may also go from rank to rank in place: where two cores
# share little, that took less than half of the time (102 MB: 17 to 21 ms against 52), elsewhere a
# third more (21 against 15); see docs/decisions/fastest.md.
LARGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Ground:
    """What a plan builds on.

    Attributes:
        comm: all ranks.
        topology: their nodes.
        transport: among all of them.
        chunk_bytes: the size of chunks that the user asked for; None for the plan's own.
    """

    comm: MPI.Intracomm
    topology: Topology
    transport: Transport
    chunk_bytes: int | None = None


Plan = Callable[[Ground], Reducer]


@dataclass(frozen=True)
class Plans:
    """Which way gradients go that lie in host memory, and which way those on GPUs."""

    on_cpus: Plan
    on_gpus: Plan


def one_by_one(ground: Ground) -> Reducer:
    """Every array by itself, straight through MPI."""
    return Direct(ground.transport, False, ground.chunk_bytes)


def batched(ground: Ground) -> Reducer:
    """Small arrays packed together, straight through MPI."""
    return Direct(ground.transport, True, ground.chunk_bytes)


def one_lane(ground: Ground) -> Reducer:
    """Through shared memory in each node; one rank of each exchanges with other nodes."""
    return _through_nodes(ground, 1)


def many_lanes(ground: Ground) -> Reducer:
    """Through shared memory in each node; as many ranks as possible exchange, each a shard."""
    nodes = ground.topology.nodes
    return _through_nodes(ground, min(nodes.count(node) for node in nodes))


def in_memory_only(plan: Plan, topology: Topology) -> bool:
    """Whether gradients go that way through no wire, and needn't get narrower for one."""
    return plan in (one_lane, many_lanes) and topology.inter_size == 1


def for_gpus_only(ground: Ground) -> Reducer:
    """No way at all; the error is the same on all ranks."""
    raise ValueError(
        f"rank {ground.comm.rank}: communicator 'pure_nccl' takes gradients on GPUs, and these are "
        "NumPy arrays; move the model to the GPU (to_gpu), or on CPUs use one of: flat, "
        "hierarchical, naive, single_node, two_dimensional"
    )


def nothing(_: Ground) -> Reducer:
    """No communication at all."""
    return Nothing()


def _through_nodes(ground: Ground, lanes: int) -> Reducer:
    """The stream through shared memory, or ``batched`` where a node has none to share."""
    comm, topology = ground.comm, ground.topology
    if comm.size == 1:
        return batched(ground)
    cause = ""
    for chunk_bytes in dict.fromkeys((ground.chunk_bytes, None)):  # the latter, if smaller, may fit
        try:
            stream = (
                NodeStream(comm, topology, chunk_bytes)
                if topology.inter_size == 1
                else NetworkStream(comm, topology, lanes, chunk_bytes)
            )
        except NoSharedMemory as error:
            cause = str(error)
            continue
        except BaseException:
            abort_if_desynchronized()
            raise
        if topology.inter_size == comm.size:  # they share no memory
            return BySize(InPlace(comm, ground.chunk_bytes), stream, LARGE_BYTES)
        if topology.inter_size > 1:
            return stream
        in_place = Direct(ground.transport, False, ground.chunk_bytes, LAG)
        large = Fastest(comm, [stream, in_place])
        return BySize(large, stream, LARGE_BYTES)
    if comm.rank == 0:
        print(f"ChainerMN: {cause}; gradients go through MPI instead", file=sys.stderr)
    return batched(ground)
