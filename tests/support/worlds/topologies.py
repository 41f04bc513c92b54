"""Communicators over discovered and imposed topologies."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

from chainermn_comm import CommunicatorBase, Topology
from chainermn_comm.config import NAMES as KNOWN
from chainermn_comm.sums import HostBackend, packed

# All that give a mean on CPUs.
NAMES = tuple(name for name in KNOWN if name not in ("pure_nccl", "dummy"))
# On one node there are no more algorithms than these; the other names take the last.
ALGORITHMS = ("naive", "flat", "hierarchical")


# Node of each rank, by the number of ranks: one node, one node a rank, uneven,
# interleaved.
class _Imposed(dict[int, list[tuple[int, ...]]]):
    # On a machine of many GPUs.
    def __missing__(self, size: int) -> list[tuple[int, ...]]:
        return [(0,) * size, tuple(rank * 2 // size for rank in range(size))]


IMPOSED = _Imposed(
    {
        size: [tuple(map(int, nodes)) for nodes in every.split()]
        for size, every in enumerate(
            ["0", "00 01", "000 001 012 010", "0000 0011 0001 0122 0101 0110 0123"],
            start=1,
        )
    }
)
# Of these, those of the first tiers: one of each kind on as few ranks as show it.
CHOSEN = {(0,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1), (0, 1, 2), (0, 0, 1, 1)}


def on_nodes(
    nodes: Iterable[int | str], name: str = "hierarchical", **how
) -> CommunicatorBase:
    """What `create_communicator` makes, as if rank i were on node `nodes[i]` (collective)."""
    from chainermn_comm.named_communicators import CLASSES  # it starts MPI

    return CLASSES[name](_topology=Topology.of(tuple(nodes)), **how)


def telling(name: str, size: int) -> list[tuple[int, ...]]:
    """The imposed topologies that say something new of a communicator's algorithm on CPUs."""
    # Nodes make no difference, or there is one.
    if name in ("naive", "flat", "single_node"):
        return IMPOSED[size][:1]
    # Elsewhere one rank of a node exchanges: that is `hierarchical`.
    if name == "two_dimensional":
        return [n for n in IMPOSED[size] if len(set(n)) > 1 < min(map(n.count, n))]
    return IMPOSED[size]


def over_nodes(*names: str, least: int = 2):
    """Parametrize a world test by `name` and `nodes`, of which only those that tell, and fit.

    Each runs on as many ranks as it has nodes, `least` or more; by default one of each
    kind.
    """
    cases = []
    for name, size in product(names, range(least, 1 + max(IMPOSED))):
        for nodes in telling(name, size):
            marks = [
                pytest.mark.sizes(size),
                *([] if nodes in CHOSEN else [pytest.mark.full]),
            ]
            where = "".join(map(str, nodes))
            cases.append(pytest.param(name, nodes, marks=marks, id=f"{name}-{where}"))
    return pytest.mark.parametrize(("name", "nodes"), cases)


def by_name(*chosen: str) -> list[Any]:
    """Names of communicators for a test's parameter; in the first tiers only those chosen."""
    return [
        pytest.param(name, marks=() if name in chosen else pytest.mark.full)
        for name in NAMES
    ]


def host_backend(group):
    """A backend for host memory, which sums by messages."""
    return HostBackend(group, packed)


def algorithm_of(comm: CommunicatorBase):
    """What takes the means of the communicator's gradients in host memory, once it has."""
    return comm._backends[0].made_gradient_sum  # type: ignore[attr-defined]
