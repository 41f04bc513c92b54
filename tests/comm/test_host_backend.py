"""What broadcasts in parts: large arrays in host memory, among more than two ranks of a node."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm.sums import host_backend
from tests.support.worlds.models import Model, Param
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]


@pytest.fixture
def used(monkeypatch):
    """The roots of broadcasts in parts."""
    found = []
    real = host_backend.bcast_in_parts

    def bcast_in_parts(comm, buffer, root, tag):
        found.append(root)
        real(comm, buffer, root, tag)

    monkeypatch.setattr(host_backend, "bcast_in_parts", bcast_in_parts)
    return found


@pytest.fixture
def small(monkeypatch):
    """Let small arrays go in parts."""
    monkeypatch.setattr(host_backend, "IN_PARTS_BYTES", 8)


def test_arrays_of_8_mib_do(naive, used):
    for nbytes in (8 << 20, (8 << 20) - 1):
        mine = np.full(nbytes, naive.rank, np.uint8)
        assert not naive.bcast(mine).any()
    assert used == ([0] if naive.size > 2 else [])


@pytest.mark.usefixtures("small")
def test_all_of_a_tuple_and_of_a_model(naive, used):
    """And a user's message that is under way is not taken for a part."""
    rank = naive.rank
    root = naive.size - 1
    if rank == root:
        for other in range(root):
            naive.send(np.full(99, -1.0), other, 0)

    def row(rank):
        return np.full((5, 7), float(rank)), np.full((3, 4), rank, "i2", order="F")

    found = naive.bcast((*row(rank), np.int8(rank)), root=root)
    for array, expected in zip(found, (*row(root), np.int8(root)), strict=True):
        np.testing.assert_array_equal(array, expected)
    assert found[1].flags.f_contiguous
    own = float(rank)
    model = Model(v=Param(np.full(100, own)), w=Param(np.full((4, 3), own)))
    naive.bcast_data(model)
    for param in model.params.values():
        np.testing.assert_array_equal(param.data, 0)
    assert used == ([root, root, 0, 0] if naive.size > 2 else [])
    if rank != root:
        np.testing.assert_array_equal(naive.recv(root, 0), np.full(99, -1.0))


@pytest.mark.usefixtures("small")
def test_between_nodes_mpi_broadcasts(world, used):
    with on_nodes([rank % 2 for rank in range(world.size)], "naive") as comm:
        assert np.array_equal(comm.bcast(np.full(99, comm.rank)), np.zeros(99))
    assert not used
