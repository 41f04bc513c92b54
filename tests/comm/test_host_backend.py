"""Which broadcasts go in parts: large ones of host memory, among more than two ranks of a node."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm.allreduce import host_backend
from tests.support.models import with_grads
from tests.support.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]


@pytest.fixture
def used(monkeypatch):
    """The roots of broadcasts in parts, which small arrays have here, too."""
    found, real = [], host_backend.bcast_in_parts

    def bcast_in_parts(comm, buffer, root, tag):
        found.append(root)
        real(comm, buffer, root, tag)

    monkeypatch.setattr(host_backend, "IN_PARTS_BYTES", 8)
    monkeypatch.setattr(host_backend, "bcast_in_parts", bcast_in_parts)
    return found


def test_bcast_and_bcast_data_on_one_machine(naive, used):
    rank, root = naive.rank, naive.size - 1
    rows = [np.full((5, 7), float(root)), np.full((3, 4), root, "i2", order="F"), np.int8(root)]
    sent = tuple(row + np.asarray(rank - root, row.dtype) for row in rows)
    found = naive.bcast(sent, root=root)
    assert all(map(np.array_equal, found, rows))
    assert found[1].flags.f_contiguous
    model = with_grads(v=np.ones(100), w=np.ones((4, 3)))
    for param in model.params.values():
        param.data = np.full_like(param.grad, rank + 1.0)
    naive.bcast_data(model)
    assert all((param.data == 1).all() for param in model.params.values())
    assert used == ([root, root, 0, 0] if naive.size > 2 else [])


def test_between_nodes_mpi_broadcasts(world, used):
    with on_nodes([rank % 2 for rank in range(world.size)], "naive") as comm:
        assert np.array_equal(comm.bcast(np.full(99, comm.rank)), np.zeros(99))
    assert not used
