"""Communicators of every kind, over discovered and imposed topologies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

NAMES = ("naive", "flat", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware")
# Node of each rank, by the number of ranks: one node, one node a rank, uneven, interleaved.
IMPOSED: dict[int, list[tuple[int, ...]]] = {
    1: [(0,)],
    2: [(0, 0), (0, 1)],
    3: [(0, 0, 0), (0, 0, 1), (0, 1, 0)],
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
