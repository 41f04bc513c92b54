"""What broadcasts in parts: large arrays in host memory, among more than two ranks of a node."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm.sums import host_backend
from tests.support.worlds.models import with_grads
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]


@pytest.fixture
def used(monkeypatch):
    """The roots of broadcasts in parts."""
    found, real = [], host_backend.bcast_in_parts

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
    rank, root = naive.rank, naive.size - 1

    def rows(rank):
        fields = (
            np.full(9, rank, np.uint8).repeat(16).view(np.dtype("i1,f8", align=True))
        )
        return (
            np.full((5, 7), float(rank)),
            np.full((3, 4), rank, "i2", order="F"),
            fields,
        )

    sent = rows(rank)
    sent[0].flags.writeable = False
    found = naive.bcast((*sent, np.int8(rank)), root=root)
    assert all(
        a.tobytes() == b.tobytes() for a, b in zip(found, rows(root), strict=False)
    )
    assert found[1].flags.f_contiguous
    assert found[3] == root
    model = with_grads(v=np.ones(100), w=np.ones((4, 3)))
    for param in model.params.values():
        param.data = np.full_like(param.grad, rank + 1.0)
    naive.bcast_data(model)
    assert all((param.data == 1).all() for param in model.params.values())
    assert used == ([root, root, root, 0, 0] if naive.size > 2 else [])


@pytest.mark.usefixtures("small")
def test_between_nodes_mpi_broadcasts(world, used):
    with on_nodes([rank % 2 for rank in range(world.size)], "naive") as comm:
        assert np.array_equal(comm.bcast(np.full(99, comm.rank)), np.zeros(99))
    assert not used


@pytest.mark.usefixtures("small")
def test_a_users_message_under_way_is_not_taken_for_a_part(naive):
    rank, size = naive.rank, naive.size
    if rank == 0:
        for other in range(1, size):
            naive.send(np.full(99, -1.0), other, 0)
    assert np.array_equal(naive.bcast(np.full(99, float(rank))), np.zeros(99))
    if rank > 0:
        assert np.array_equal(naive.recv(0, 0), np.full(99, -1.0))
