"""`share_dataset` gives all ranks all examples, whose arrays lie once on each machine."""

from __future__ import annotations

import numpy as np
import pytest
from chainer.dataset import DatasetMixin
from chainer.datasets import TupleDataset

from chainermn_comm import PeerError
from chainermn_train import share_dataset
from tests.support.oracles.alike import alike
from tests.support.oracles.mapped import lies_in

pytestmark = pytest.mark.world


def make():
    return TupleDataset(
        np.arange(300.0).reshape(100, 3), list("ab" * 50), np.arange(100, dtype="i1")
    )


@pytest.mark.parametrize("last", [False, True])
def test_all_ranks_have_all_examples_and_a_machine_one_copy(comm, last):
    root = comm.size - 1 if last else 0
    shared = share_dataset(make() if comm.rank == root else None, comm, root)
    assert len(shared) == 100
    assert all(
        alike(found, expected) for found, expected in zip(shared, make(), strict=True)
    )
    places = comm.allgather_obj((comm.inter_rank, lies_in(shared[0][0])))
    assert len(set(places)) == len({node for node, _ in places})
    shared[3][0][:] = comm.rank  # stays here
    comm.allgather_obj(None)
    assert shared[3][0].tolist() == [comm.rank] * 3


class Computed(DatasetMixin):
    def __len__(self):
        return 7

    def get_example(self, i):
        return 3 * i + 1


def test_a_data_set_that_only_its_class_can_divide(comm):
    shared = share_dataset(Computed() if comm.rank == 0 else None, comm)
    assert [shared[i] for i in range(len(shared))] == [3 * i + 1 for i in range(7)]


def test_nothing_is_a_data_set_too(comm):
    assert len(share_dataset(np.zeros((0, 3)) if comm.rank == 0 else None, comm)) == 0


def test_what_is_no_data_set_is_told_on_all_ranks(naive):
    with pytest.raises((TypeError, PeerError), match="must have a len"):
        share_dataset(3, naive)
    with pytest.raises((ValueError, PeerError), match="root must be from 0 to"):
        share_dataset([1], naive, naive.size)
