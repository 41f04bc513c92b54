"""Communicators over discovered and imposed topologies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chainermn_comm import CommunicatorBase, Topology
from chainermn_comm.catalogue import make_communicator

# All that give a mean on CPUs.
NAMES = ("naive", "flat", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware")
# Node of each rank, by the number of ranks: one node, one node a rank, uneven, interleaved.
IMPOSED: dict[int, list[tuple[int, ...]]] = {
    1: [(0,)],
    2: [(0, 0), (0, 1)],
    3: [(0, 0, 0), (0, 0, 1), (0, 1, 2), (0, 1, 0)],
    4: [
        (0, 0, 0, 0),
        (0, 0, 1, 1),
        (0, 0, 0, 1),
        (0, 1, 2, 2),
        (0, 1, 0, 1),
        (0, 1, 1, 0),
        (0, 1, 2, 3),
    ],
}


def on_nodes(
    nodes: Iterable[int | str], name: str = "hierarchical", **how: Any
) -> CommunicatorBase:
    """A communicator over all ranks, as if rank i were on node `nodes[i]` (collective).

    Args:
        nodes: the node of each rank.
        name: as `create_communicator` takes it.
        how: further arguments, as `create_communicator` takes them.
    """
    return make_communicator(name, topology=Topology.of(tuple(nodes)), **how)


def telling(name: str, size: int) -> list[tuple[int, ...]]:
    """The imposed topologies that say something new of a communicator's way on CPUs.

    Where each test costs much: `test_plans` has models over all of them for each name.
    """
    if name in ("naive", "flat", "single_node"):  # nodes make no difference, or there is one
        return IMPOSED[size][:1]
    if name == "two_dimensional":  # elsewhere one rank of a node exchanges: that is `hierarchical`
        return [
            nodes for nodes in IMPOSED[size] if len(set(nodes)) > 1 < min(map(nodes.count, nodes))
        ]
    return IMPOSED[size]
