"""Data sets are divided among the ranks: each example where it belongs, and nowhere else."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import pytest
from chainer.dataset import DatasetMixin
from chainer.datasets import (
    ConcatenatedDataset,
    SubDataset,
    TransformDataset,
    TupleDataset,
)

from chainermn_comm import CommunicatorBase, PeerError
from chainermn_train import (
    get_n_iterations_for_one_epoch,
    scatter_dataset,
    scatter_index,
    share_dataset,
)
from tests.support.oracles.pickles import Awkward
from tests.support.worlds.third_party import PlainCommunicator, WithoutSplit

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


KINDS = {
    "array": lambda n: np.arange(3 * n, dtype=np.float32).reshape(n, 3),
    "tuple data set": lambda n: TupleDataset(np.arange(n) / 2, list(range(n))),
    "computed": Squares,
}


def examples(dataset):
    """The examples as something that can be compared."""
    return [np.asarray(dataset[i]).tolist() for i in range(len(dataset))]


def everything(comm, part):
    return [example for one in comm.allgather_obj(examples(part)) for example in one]


@pytest.mark.parametrize("kind", KINDS)
def test_each_example_goes_to_exactly_one_rank_unless_lengths_are_made_equal(
    naive, kind
):
    for count in 0, 1, 3 * naive.size + 1:
        whole = KINDS[kind](count)
        given = whole if naive.rank == 0 else None
        part = scatter_dataset(given, naive, force_equal_length=False)
        assert everything(naive, part) == examples(whole)
        equal = scatter_dataset(given, naive)
        assert len(equal) == math.ceil(count / naive.size)
        received = everything(naive, equal)
        assert all(example in received for example in examples(whole))


# How to make a data set, and where an `Opened` is in it.
CLASSES = {
    "own": (Opened, lambda d: d),
    "two": (
        lambda: ConcatenatedDataset(Opened(0, 4), Opened(4, 6)),
        lambda d: d._datasets[1],
    ),
    "transformed": (lambda: TransformDataset(Opened(), str), lambda d: d._dataset),
    "beside labels": (
        lambda: TupleDataset(Opened(), np.arange(10)),
        lambda d: d._datasets[0],
    ),
    "before an array": (
        lambda: ConcatenatedDataset(Opened(), np.arange(7)),
        lambda d: d._datasets[0],
    ),
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_the_users_class_and_its_attributes_are_behind_the_result(naive, kind, shuffle):
    """As ChainerMN gave it, so that scripts read and set attributes of `_dataset`."""
    make, find = CLASSES[kind]
    whole = make()
    part = scatter_dataset(whole, naive, shuffle=shuffle, seed=4)
    order = np.random.RandomState(4).permutation(len(whole)) if shuffle else None
    begin, end = scatter_index(len(whole), naive)
    expected = SubDataset(whole, begin, end, order)
    assert (type(part), type(part._dataset)) == (SubDataset, type(whole))
    if "array" not in kind and "labels" not in kind:  # it can't be divided
        assert (part._start, part._finish) == (begin, end)
        assert naive.rank or part._dataset is whole
    found = find(part._dataset)
    getattr(found, "_dataset", found).file = find(whole).file = "opened"
    assert list(part) == list(expected)


class Lacking(WithoutSplit):
    """It defines no `split` at all."""

    split = CommunicatorBase.split


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", [PlainCommunicator, WithoutSplit, Lacking])
def test_a_users_message_on_its_way_arrives_unharmed(world, kind):
    """Whatever its tag, and also where `split` can't be called."""
    comm = kind(world)
    whole = TupleDataset(np.arange(9), np.arange(9))
    last = comm.size - 1
    if comm.rank == 0:
        comm.send("the user's", last, 23719)
    part = scatter_dataset(whole, comm, force_equal_length=False)
    assert everything(comm, part) == [[i, i] for i in range(9)]
    if comm.rank == last:
        assert comm.recv(0, 23719) == "the user's"


def test_what_needs_split_says_so(world):
    with pytest.raises(NotImplementedError, match="Lacking has no split"):
        share_dataset(np.arange(4), Lacking(world))


def test_examples_are_not_computed_before_they_are_used(naive):
    """As in the ImageNet example, where only paths travel."""
    Squares.computed.clear()
    part = scatter_dataset(Squares(12), naive)
    assert Squares.computed == []
    assert part[0] == (12 * naive.rank // naive.size) ** 2
    assert Squares.computed == [12 * naive.rank // naive.size]


@pytest.mark.parametrize("equal", [True, False])
def test_scatter_index_gives_the_ranges_that_scatter_dataset_gives(comm, equal):
    for count in 0, 1, 10, 13:
        n = count if comm.rank == 0 else -1  # ignored
        begin, end = scatter_index(n, comm, force_equal_length=equal)
        part = scatter_dataset(range(count), comm, force_equal_length=equal)
        assert list(range(begin, end)) == examples(part)


def epoch_of_batches(size, comm):
    return get_n_iterations_for_one_epoch(range(9), size, comm)


# Mistakes of one rank, which are raised on all and name it: what is called, what the
# root gives, the options that the last rank gives, the error, and words.
NO_ROOT = {"root": 99}
MISTAKES = [
    (scatter_dataset, range(9), NO_ROOT, ValueError, "root must be from 0"),
    (scatter_dataset, range(9), {"root": None}, TypeError, "must be an integer, not N"),
    (scatter_dataset, None, {}, TypeError, "a NoneType has not"),
    (scatter_dataset, iter([]), {}, TypeError, "a list_iterator has not: pass a list"),
    (scatter_dataset, {1, 2}, {}, TypeError, "a set has not: pass a list"),
    (scatter_index, -1, {}, ValueError, "n_total_samples must be at least 0"),
    (scatter_index, "9", {}, TypeError, "n_total_samples must be an integer"),
    (share_dataset, 3, {}, TypeError, "must have a len"),
    (share_dataset, [1], NO_ROOT, ValueError, "root must be from 0 to"),
    (epoch_of_batches, 0, {}, ValueError, "local_batch_size must be at least 1, not 0"),
    (epoch_of_batches, "2", {}, TypeError, "local_batch_size must be an integer"),
]


@pytest.mark.parametrize(("call", "given", "options", "error", "text"), MISTAKES)
def test_a_mistake_of_one_rank_is_an_error_on_all(
    comm, call, given, options, error, text
):
    culprit = comm.size - 1 if options else 0
    with pytest.raises((error, PeerError), match=text) as raised:
        call(given, comm, **(options if comm.rank == culprit else {}))
    assert (raised.type is error) == (comm.rank == culprit)
    assert comm.rank == culprit or f"rank {culprit}: " in str(raised.value)
    part = scatter_dataset(np.arange(4), comm)  # it still works
    assert len(part) == math.ceil(4 / comm.size)


def test_what_is_no_communicator_and_roots_that_differ_are_told(comm):
    for scatter, given in (scatter_dataset, range(9)), (scatter_index, 9):
        with pytest.raises(TypeError, match=r"unless .* mpi4py .*not str"):
            scatter(given, "naive")
        if comm.size > 1:
            with pytest.raises(ValueError, match="disagree on root: 0 on rank 0; 1 on"):
                scatter(given, comm, root=min(1, comm.rank))


class Unreadable(list):
    """A list that cannot be pickled; a subclass is sent as it is."""

    def __reduce_ex__(self, protocol):
        raise OSError("disk failure")


@pytest.mark.sizes(2, 3, 4)
def test_a_part_that_cannot_be_pickled_or_unpickled_is_an_error_on_all(comm):
    last = comm.size - 1
    rows = np.zeros((comm.size, 3))
    for culprit, error, text, whole in [
        # Others got theirs.
        (0, ValueError, "does not travel", [*range(last), Awkward("there")]),
        (0, OSError, "disk failure", Unreadable([1, 2])),
        (last, ValueError, "not arrive", [*range(last), Awkward("here")]),
        (last, ValueError, "not arrive", TupleDataset(rows, [*range(last), Awkward()])),
    ]:
        with pytest.raises(error if comm.rank == culprit else PeerError, match=text):
            scatter_dataset(whole, comm)
    assert len(scatter_dataset(np.arange(comm.size), comm)) == 1
