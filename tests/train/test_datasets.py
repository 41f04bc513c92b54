"""Data sets are divided among the ranks: each example where it belongs, and nowhere else."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import ClassVar

import numpy as np
import pytest
from chainer.dataset import DatasetMixin
from chainer.datasets import (
    ConcatenatedDataset,
    SubDataset,
    TupleDataset,
)
from numpy.random import RandomState

from chainermn_train import (
    get_n_iterations_for_one_epoch,
    scatter_dataset,
    scatter_index,
    share_dataset,
)
from tests.support.oracles.raised import Awkward, raises_on_all

pytestmark = pytest.mark.world


class Squares(DatasetMixin):
    """A data set that computes its examples, and remembers which of all its objects."""

    computed: ClassVar[list[int]] = []

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def get_example(self, i):
        self.computed.append(i)
        return i * i


class Opened(DatasetMixin):
    """Examples are read with what its owner sets later."""

    file = None

    def __init__(self, begin=0, count=10):
        self.numbers = range(begin, begin + count)

    def __len__(self):
        return len(self.numbers)

    def get_example(self, i):
        return self.file, self.numbers[i]


def array(n):
    return np.arange(3 * n, dtype=np.float32).reshape(n, 3)


def tuple_data_set(n):
    return TupleDataset(np.arange(n) / 2, list(range(n)))


KINDS = {
    "array": array,
    "tuple data set": tuple_data_set,
    "computed": Squares,
}


def examples(dataset):
    """The examples as something that can be compared."""
    return [np.asarray(dataset[i]).tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("equal", [False, True])
def test_each_example_goes_to_one_rank_or_parts_are_equally_long(comm, kind, equal):
    """`scatter_index` says where they begin and end. None is computed on the way."""
    for count in 0, 1, 3 * comm.size + 1:
        whole = KINDS[kind](count)
        Squares.computed.clear()
        given = None
        if comm.rank == 0:
            given = whole
        part = scatter_dataset(given, comm, force_equal_length=equal)
        assert Squares.computed == []
        if comm.rank == 0:
            ignored_elsewhere = count
        else:
            ignored_elsewhere = -1
        bounds = scatter_index(ignored_elsewhere, comm, force_equal_length=equal)
        assert examples(part) == examples(SubDataset(whole, *bounds))
        parts = comm.allgather_obj(list(range(*bounds)))
        if equal:
            assert {len(each) for each in parts} == {math.ceil(count / comm.size)}
            assert set().union(*parts) == set(range(count))
        else:
            found = list(itertools.chain(*parts))
            assert found == list(range(count))


# How to make a data set, and where an `Opened` is in it.


def joined():
    return ConcatenatedDataset(Opened(0, 4), Opened(4, 6))


CLASSES = {
    "own": (Opened, lambda d: d),
    "two": (
        joined,
        lambda d: d._datasets[1],
    ),
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_the_users_class_and_its_attributes_are_behind_the_result(naive, kind, shuffle):
    """As ChainerMN gave it, so that scripts read and set attributes of `_dataset`."""
    make, find = CLASSES[kind]
    whole = make()
    part = scatter_dataset(whole, naive, shuffle=shuffle, seed=4)
    order = None
    if shuffle:
        order = RandomState(4).permutation(10)
    expected = SubDataset(whole, *scatter_index(10, naive), order)
    assert type(part._dataset) is type(whole)
    assert part._start == expected._start
    assert part._finish == expected._finish
    assert naive.rank or part._dataset is whole
    find(part._dataset).file = find(whole).file = "opened"
    assert list(part) == list(expected)


@pytest.mark.parametrize("combined", [ConcatenatedDataset, TupleDataset])
def test_beside_an_array_the_users_class_stays_whole(naive, combined):
    whole = combined(Opened(), np.arange(10))
    part = scatter_dataset(whole, naive)
    assert type(part._dataset) is combined
    assert part._dataset._datasets[0]._dataset.numbers == range(10)
    bounds = scatter_index(len(whole), naive)
    assert list(part) == list(SubDataset(whole, *bounds))


@pytest.mark.sizes(2, 3, 4)
def test_a_users_message_on_its_way_arrives_unharmed(comm):
    last = comm.size - 1
    if comm.rank == 0:
        comm.send(np.float32(7), last, 23719)
    found = len(scatter_dataset(np.arange(9), comm))
    assert found == math.ceil(9 / comm.size)
    if comm.rank == last:
        assert comm.recv(0, 23719) == 7


def epoch_of_batches(size, comm):
    return get_n_iterations_for_one_epoch(range(9), size, comm)


# Mistakes of one rank, which are raised on all and name it: what is called, what the
# root gives, the options that the last rank gives, the error, and words.
MISTAKES = [
    (scatter_dataset, range(9), {"root": 99}, ValueError, "root must be from 0"),
    (scatter_dataset, range(9), {"root": None}, TypeError, "must be an integer, not N"),
    (scatter_dataset, None, {}, TypeError, "a NoneType has not"),
    (scatter_dataset, iter([]), {}, TypeError, "a list_iterator has not: pass a list"),
    (scatter_index, -1, {}, ValueError, "n_total_samples must be at least 0"),
    (scatter_index, "9", {}, TypeError, "n_total_samples must be an integer"),
    (share_dataset, 3, {}, TypeError, "must have a len"),
    (epoch_of_batches, 0, {}, ValueError, "local_batch_size must be at least 1, not 0"),
]


@pytest.mark.parametrize(("call", "given", "options", "error", "text"), MISTAKES)
def test_a_mistake_of_one_rank_is_an_error_on_all(
    comm, call, given, options, error, text
):
    culprit = 0
    if options:
        culprit = comm.size - 1
    wrong = comm.rank == culprit
    mine = {}
    if wrong:
        mine = options
    with raises_on_all(wrong, error, text) as raised:
        call(given, comm, **mine)
    assert wrong or f"rank {culprit}: " in str(raised.value)
    part = scatter_dataset(np.arange(4), comm)  # it still works
    assert len(part) == math.ceil(4 / comm.size)


def test_a_tuple_of_columns_is_warned_of_at_the_root(comm):
    """Each column would count as an example; an example may be an array, too."""
    x, t = np.zeros((9, 2)), np.zeros(9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(scatter_dataset((x, t), comm)) == math.ceil(2 / comm.size)
        for dataset in [x, t], (t[:2], t[:2]), (x, t[:5]), TupleDataset(x, t):
            scatter_dataset(dataset, comm)
    texts = [str(each.message) for each in caught]
    assert len(texts) == (comm.rank == 0)
    assert all("did you mean chainer.datasets.TupleDataset" in each for each in texts)


def test_what_is_no_communicator_and_roots_that_differ_are_told(comm):
    with pytest.raises(TypeError, match=r"unless .* mpi4py .*not str"):
        scatter_index(9, "naive")
    if comm.size > 1:
        with pytest.raises(ValueError, match="disagree on root: 0 on rank 0; 1 on"):
            scatter_dataset(range(9), comm, root=min(1, comm.rank))


@pytest.mark.sizes(2, 3, 4)
def test_a_part_that_cannot_be_pickled_or_unpickled_is_an_error_on_all(comm):
    last = comm.size - 1
    rows = np.zeros((comm.size, 3))  # which travel, though what is beside them fails
    for culprit, where, text in (
        (0, "there", "not travel"),
        (last, "here", "not arrive"),
    ):
        whole = TupleDataset(rows, [*range(last), Awkward(where)])
        with raises_on_all(comm.rank == culprit, ValueError, text):
            scatter_dataset(whole, comm)
    assert len(scatter_dataset(np.arange(comm.size), comm)) == 1
