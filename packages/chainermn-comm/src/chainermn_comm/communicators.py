"""The communicators by name: each has a backend for arrays on hosts and one for GPUs."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeAlias

from . import sums
from .gpu import nccl
from .gpu_sums import NcclBackend, sum_through_host
from .messaging import Backend, MakeSum, ProcessGroup
from .sums import HostBackend
from .topology import Topology

# For arrays in host memory, and for arrays on GPUs.
Backends: TypeAlias = tuple[Backend, Backend]


def naive(group: ProcessGroup) -> Backends:
    """Array by array, straight through MPI."""
    return _on_hosts(group, sums.per_tensor), _staged(group)


def flat(group: ProcessGroup) -> Backends:
    """Packed into chunks, straight through MPI."""
    return _on_hosts(group, sums.packed), _staged(group)


def hierarchical(group: ProcessGroup) -> Backends:
    """Through each node's shared memory or NCCL; one rank of each node reaches other nodes."""
    return (
        _on_hosts(group, sums.single_leader),
        _by_nccl(group),
    )


def two_dimensional(group: ProcessGroup) -> Backends:
    """As hierarchical, but as many ranks reach other nodes as the smallest node has."""
    return (
        _on_hosts(group, sums.multi_leader),
        _by_nccl(group, leaders=group.topology.least_intra_size),
    )


def single_node(group: ProcessGroup) -> Backends:
    """Through one node's shared memory or NCCL."""
    return _on_hosts(group, sums.single_leader), _by_nccl(group, _one_node(group))


def non_cuda_aware(group: ProcessGroup) -> Backends:
    """As hierarchical, but NCCL stays within nodes."""
    return _on_hosts(group, sums.single_leader), _by_nccl(group, staged=True)


def pure_nccl(group: ProcessGroup) -> Backends:
    """Straight through NCCL, for gradients on GPUs only."""
    return HostBackend(group, sums.gpus_only), _by_nccl(group, _one_node(group))


def dummy(group: ProcessGroup) -> Backends:
    """Nowhere, to measure everything else."""
    return HostBackend(group, sums.no_op), HostBackend(group, sums.no_op)


#: Users may add functions of their own.
COMMUNICATORS: dict[str, Callable[[ProcessGroup], Backends]] = {
    "naive": naive,
    "flat": flat,
    "hierarchical": hierarchical,
    "two_dimensional": two_dimensional,
    "single_node": single_node,
    "non_cuda_aware": non_cuda_aware,
    "pure_nccl": pure_nccl,
    "dummy": dummy,
}


def check_name(name: Any) -> None:
    """Raise ValueError unless a communicator has this name, and can be made here."""
    if not isinstance(name, str) or name not in COMMUNICATORS:
        nearest = difflib.get_close_matches(str(name), COMMUNICATORS, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise ValueError(f"unknown communicator {name!r}{hint}; use one of: {_known()}")
    if name == "pure_nccl":
        reason = nccl.unavailable_reason()
        if reason is not None:
            raise ValueError(
                f"communicator 'pure_nccl' is for GPUs, and {reason}; on CPUs use one of: "
                f"{_known('pure_nccl')}"
            )


def _known(left_out: str = "") -> str:
    """Return the known names as text, with `dummy`, which takes no means, at the end."""
    names = sorted(COMMUNICATORS.keys() - {left_out, "dummy"})
    return ", ".join([*names, "dummy (which exchanges nothing)"])


def _on_hosts(group: ProcessGroup, make_sum: MakeSum) -> Backend:
    if group.settings.reproducible:
        return HostBackend(group, sums.rank_ordered)
    return HostBackend(group, make_sum)


def _by_nccl(
    group: ProcessGroup,
    nodes: Topology | None = None,
    leaders: int = 1,
    staged: bool = False,
) -> Backend:
    if group.settings.reproducible:
        return _staged(group)
    return NcclBackend(group, nodes or group.topology, leaders, staged)


def _one_node(group: ProcessGroup) -> Topology:
    """Return a topology of one node, with which NCCL sums among all ranks at once."""
    return Topology((0,) * group.size)


def _staged(group: ProcessGroup) -> Backend:
    return HostBackend(group, sum_through_host)
