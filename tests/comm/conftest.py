"""Communicators of every kind, over discovered and imposed topologies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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


@pytest.fixture(params=NAMES)
def comm(request: pytest.FixtureRequest) -> Iterator:
    """A communicator of each name over all ranks."""
    from chainermn_comm import create_communicator

    with create_communicator(request.param) as communicator:
        yield communicator


@pytest.fixture
def naive() -> Iterator:
    """A `naive` communicator, where the name makes no difference."""
    from chainermn_comm import create_communicator

    with create_communicator("naive") as communicator:
        yield communicator
