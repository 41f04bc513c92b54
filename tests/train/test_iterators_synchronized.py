"""The synchronized iterator reads each rank's own data set, in the same order on all ranks."""

from __future__ import annotations

import numpy as np
import pytest
from chainer.serializers import load_npz, save_npz

from chainermn_comm import RankMismatchError
from chainermn_train import create_synchronized_iterator
from tests.support.training.trainers import every_kind, serial, threads

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("forkserver")]

N = 25


@pytest.fixture(autouse=True)
def generators_that_differ(world):
    np.random.seed(world.rank)


def the_same_on_all_ranks(comm, value):
    assert comm.allgather_obj(value) == [value] * comm.size
    return value


def epoch(iterator):
    """The examples of the next epoch."""
    return [int(example) for _ in range(N // 5) for example in next(iterator)]


@every_kind
def test_orders_are_the_same_across_epochs_and_resets(comm, kind):
    orders = []
    with create_synchronized_iterator(kind(np.arange(N), 5), comm) as iterator:
        for _ in range(3):
            orders += [epoch(iterator), epoch(iterator)]
            next(iterator)
            iterator.reset()
            assert iterator.epoch == 0
            assert not iterator.is_new_epoch
    the_same_on_all_ranks(comm, orders)
    for order in orders:
        assert sorted(order) == list(range(N))
    assert len(set(map(tuple, orders))) == len(orders)  # each is another one


def test_ranks_may_use_different_classes_and_the_order_is_drawn_by_rank_0(naive):
    """What ranks draw after making it, they also draw where the iterator is made on one only."""
    orders = []
    kind = [serial, threads][naive.rank % 2]
    for seed in 5, 5, 6:
        np.random.seed(seed)
        iterator = create_synchronized_iterator(kind(np.arange(N), 5), naive)
        the_same_on_all_ranks(naive, np.random.rand())
        orders.append(the_same_on_all_ranks(naive, epoch(iterator)))
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.sizes(2, 3, 4)
def test_states_that_differ_are_told_when_they_are_loaded(comm, tmp_path):
    path = str(tmp_path / f"{comm.rank}.npz")
    iterator = serial(np.arange(N))  # not synchronized
    save_npz(path, iterator)
    wrapped = create_synchronized_iterator(iterator, comm)
    with pytest.raises(RankMismatchError, match="ranks disagree on order"):
        load_npz(path, wrapped)


@pytest.mark.sizes(2, 3, 4)
def test_ranks_that_differ_are_told_so(comm):
    for options, text in [
        ({"dataset": range(9)}, "number of examples: 10 on ranks? 0.*; 9 on rank 1"),
        ({"batch_size": 2}, "batch_size: 3 on ranks? 0.*; 2 on rank 1"),
        ({"repeat": False}, "repeat: True on ranks? 0.*; False on rank 1"),
        ({"shuffle": False}, "shuffles: True on ranks? 0.*; False on rank 1"),
    ]:
        mine = {"dataset": range(10)}
        if comm.rank == 1:
            mine |= options
        with pytest.raises(RankMismatchError, match=text):
            create_synchronized_iterator(serial(**mine), comm)


def test_an_order_sampler_of_the_user_s_own_is_replaced_with_a_warning(comm, recwarn):
    """As in Chainer 7, which didn't warn."""
    own = serial(np.arange(N), 5, order_sampler=lambda order, _: np.arange(N))
    iterator = create_synchronized_iterator(own, comm)
    told = [str(each.message) for each in recwarn]
    text = "shuffles, and doesn't use function, its order"
    found = any(text in each for each in told)
    assert found == (comm.rank == 0)
    order = the_same_on_all_ranks(comm, epoch(iterator))
    assert order != sorted(order)
