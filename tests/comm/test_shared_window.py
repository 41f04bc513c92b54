"""Windows of a node's ranks, and what serves where one can't be had."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm.sums import shared_window
from chainermn_comm.sums.shared_window import SharedWindow
from tests.comm.inside import is_in_shared_memory
from tests.support.worlds.models import check_mean
from tests.support.worlds.topologies import on_nodes

pytestmark = pytest.mark.world


NO_ROOM = (
    "no room for shared memory in /dev/shm on some node (docker run --shm-size=1g)"
)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("obstacle", NO_ROOM),
        (
            "__init__",
            "shared memory could not be allocated on some node: no such memory",
        ),
        ("is_shared", "the memory that MPI calls shared is not, on some node"),
    ],
)
def test_where_one_node_has_no_window_mpi_serves_and_one_line_says_why(
    world, monkeypatch, capfd, what, line
):
    owner = SharedWindow
    if what == "obstacle":
        owner = shared_window
    real = getattr(owner, what)

    def fail(*args):
        real(*args)
        if what == "__init__":
            raise MemoryError("no such memory")
        return what == "obstacle" and shared_window.NO_ROOM

    if world.rank == world.size - 1:
        monkeypatch.setattr(owner, what, fail)
    with on_nodes((0, 0, 1, 1)[: world.size], "hierarchical") as comm:
        check_mean(comm, calls=2)
    said = capfd.readouterr().err
    expected = f"ChainerMN: {line}; gradients go through MPI instead\n"
    assert said.count(expected) == said.count("ChainerMN") == (world.rank == 0)


@pytest.mark.sizes(2, 3, 4)
def test_memory_that_is_not_shared_is_noticed(world):
    window = SharedWindow(world, [4096] * world.size)
    assert window.is_shared()
    for buffer in window.buffers:
        assert is_in_shared_memory(buffer)
    if world.rank:
        # As if this rank mapped something else.
        window.buffers[0] = np.zeros(64, np.uint8)
    assert not window.is_shared()
    window.close()
