"""Data sets are divided among the ranks: each example where it belongs, and nowhere else."""

from __future__ import annotations

import math
import re
from typing import ClassVar

import numpy as np
import pytest
from chainer.dataset import DatasetMixin, concat_examples
from chainer.datasets import (
    ConcatenatedDataset,
    SubDataset,
    TransformDataset,
    TupleDataset,
)

from chainermn_comm import CommunicatorBase, PeerError
from chainermn_train import (
    create_empty_dataset,
    scatter_dataset,
    scatter_index,
    share_dataset,
)
from tests.support.oracles.pickles import Awkward
from tests.support.worlds.third_party import WithoutSplit

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
    "sub data set": lambda n: SubDataset(
        np.arange(n + 4), 2, n + 2, np.arange(n + 4)[::-1]
    ),
    "computed": Squares,
}


def examples(dataset):
    """The examples as something that can be compared."""
    found = [dataset[i] for i in range(len(dataset))]
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in found]


def everything(comm, part):
    return [example for one in comm.allgather_obj(examples(part)) for example in one]


def at(comm, rank, dataset):
    return dataset if comm.rank == rank else None


@pytest.mark.parametrize("kind", KINDS)
def test_each_example_goes_to_exactly_one_rank_unless_lengths_are_made_equal(
    naive, kind
):
    for count in 0, 1, 3 * naive.size + 1:
        whole = KINDS[kind](count)
        part = scatter_dataset(at(naive, 0, whole), naive, force_equal_length=False)
        assert everything(naive, part) == examples(whole)
        equal = scatter_dataset(at(naive, 0, whole), naive)
        assert len(equal) == math.ceil(count / naive.size)
        received = everything(naive, equal)
        assert all(example in received for example in examples(whole))


class NamedPair(TupleDataset):
    """Of a class of the user's own, which ranks divide."""

    root = "here"


class NamedPart(SubDataset):
    root = "here"


# How to make a data set, and where an `Opened` is in it, if one is.
CLASSES = {
    "own": (Opened, lambda d: d),
    "two": (
        lambda: ConcatenatedDataset(Opened(0, 4), Opened(4, 6)),
        lambda d: d._datasets[1],
    ),
    "transformed": (lambda: TransformDataset(Opened(), str), lambda d: d._dataset),
    "columns": (
        lambda: TupleDataset(Opened(), Opened(10)),
        lambda d: d._datasets[1],
    ),
    "beside labels": (
        lambda: TupleDataset(Opened(), np.arange(10)),
        lambda d: getattr(d._datasets[0], "_dataset", d._datasets[0]),
    ),
    "before an array": (
        lambda: ConcatenatedDataset(Opened(), np.arange(7)),
        lambda d: d._datasets[0],
    ),
    "named columns": (lambda: NamedPair(np.arange(9), np.arange(9)), None),
    "named part": (lambda: NamedPart(np.arange(12), 1, 10), None),
}
# Not divided, so that the object itself is behind the result.
WHOLE = {"own", "two", "transformed", "columns"}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_the_users_class_and_its_attributes_are_behind_the_result(naive, kind, shuffle):
    """As ChainerMN gave it, so that scripts read and set attributes of `_dataset`."""
    make, find = CLASSES[kind]
    whole = make()
    part = scatter_dataset(at(naive, 0, whole), naive, shuffle=shuffle, seed=4)
    order = np.random.RandomState(4).permutation(len(whole)) if shuffle else None
    begin, end = scatter_index(len(whole), naive)
    expected = SubDataset(whole, begin, end, order)
    assert type(part) is SubDataset
    assert examples(part) == examples(expected)
    if find is None:
        assert type(part._dataset) is type(whole)
        assert part._dataset.root == "here"
        return
    assert type(part._dataset) is type(whole)
    if kind in WHOLE:
        assert (part._start, part._finish) == (begin, end)
        assert naive.rank or part._dataset is whole
    find(part._dataset).file = "opened"
    find(whole).file = "opened"
    assert examples(part) == examples(expected)


@pytest.mark.sizes(2, 3, 4)
def test_a_seed_gives_ranks_the_examples_that_chainer_7_gave_them(naive):
    """The first ranks have the longer parts; these are what Chainer 7.8.1 answered."""
    parts = {
        2: ([3, 4, 1], [0, 2]),
        3: ([3, 4], [1, 0], [2]),
        4: ([3, 4], [1], [0], [2]),
    }[naive.size]
    part = scatter_dataset(
        range(5), naive, shuffle=True, seed=np.uint32(3), force_equal_length=False
    )
    assert examples(part) == parts[naive.rank]
    equal = {
        2: ([2, 1, 4], [0, 3, 5]),
        3: ([2, 1], [4, 0], [3, 5]),
        4: ([2, 1], [1, 4], [0, 3], [3, 5]),
    }[naive.size]
    part = scatter_dataset(range(6), naive, shuffle=True, seed=1)
    assert examples(part) == equal[naive.rank]


class Lacking(WithoutSplit):
    """It defines no `split` at all."""

    split = CommunicatorBase.split


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", [None, WithoutSplit, Lacking])
def test_a_users_message_on_its_way_arrives_unharmed(world, comm, kind):
    """Under any tag, 23719 was the library's own once; also where `split` can't be called."""
    if kind is not None:
        comm = kind(world)
    whole = TupleDataset(np.arange(9), list(range(9)))
    last = comm.size - 1
    tags = (23719, 0)
    if comm.rank == 0:
        for tag in tags:
            comm.send(np.array([float(tag)]), last, tag)
    part = scatter_dataset(at(comm, 0, whole), comm, force_equal_length=False)
    assert everything(comm, part) == [(i, i) for i in range(9)]
    if comm.rank == last:
        assert [comm.recv(0, tag).tolist() for tag in tags] == [[23719.0], [0.0]]


def test_what_needs_split_says_so(world):
    comm = Lacking(world)
    with pytest.raises(NotImplementedError, match="Lacking has no split"):
        share_dataset(at(comm, 0, np.arange(4)), comm)


def test_an_mpi4py_communicator_scatters(world, naive):
    part = scatter_dataset(at(naive, 0, np.arange(10)), world, force_equal_length=False)
    assert everything(naive, part) == list(range(10))
    last = world.size - 1
    begin, end = scatter_index(world.rank * 8, world, root=last)
    assert begin == 8 * last * world.rank // world.size
    assert end - begin == math.ceil(8 * last / world.size)
    assert world.allreduce(1) == naive.size  # it is still the caller's


def test_examples_can_be_changed_in_place_and_no_other_ranks_change(naive):
    """Each rank has the same four examples."""
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    whole = ConcatenatedDataset(*[TupleDataset(rows, range(4))] * naive.size)
    part = scatter_dataset(at(naive, 0, whole), naive)
    example = part[0][0]
    example += 1 + naive.rank
    part[1:3][0][0][:] = -naive.rank
    naive.allgather_obj(None)
    expected = rows.copy()
    expected[0] += 1 + naive.rank
    expected[1] = -naive.rank
    np.testing.assert_array_equal([x for x, _ in part], expected)
    batch = concat_examples([x for x, _ in part])
    batch *= 2
    np.testing.assert_array_equal(part[3][0], rows[3])


def test_arrays_are_no_longer_the_roots(naive):
    whole = np.zeros((8, 2))
    part = scatter_dataset(at(naive, 0, whole), naive)
    whole[:] = 1
    naive.allgather_obj(None)
    assert not part[0].any()


def test_examples_are_not_computed_before_they_are_used(naive):
    """As in the ImageNet example, where only paths travel."""
    whole = Squares(12)
    Squares.computed.clear()
    part = scatter_dataset(at(naive, 0, whole), naive)
    assert Squares.computed == []
    assert part[0] == (12 * naive.rank // naive.size) ** 2
    assert Squares.computed == [12 * naive.rank // naive.size]


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_rank_receives_its_own_examples_only(world, plain_communicator, shuffle):
    received = []

    class Counting(plain_communicator):  # type: ignore[valid-type,misc]
        def recv(self, source, tag):
            data = super().recv(source, tag)
            received.append(data.nbytes)
            return data

        def split(self, color, key):
            return Counting(self.mpi.Split(color, key))

    comm = Counting(world)
    whole = TupleDataset(np.zeros((1000, 100)), [b"x" * 100] * 1000)
    part = scatter_dataset(at(comm, 0, whole), comm, shuffle=shuffle)
    assert sum(received) < 1.2 * (800 + 100) * len(part)


@pytest.mark.parametrize("equal", [True, False])
def test_scatter_index_gives_the_ranges_that_scatter_dataset_gives(comm, equal):
    for count in 0, 1, 10, 13:
        n = count if comm.rank == 0 else -1  # ignored
        begin, end = scatter_index(n, comm, force_equal_length=equal)
        part = scatter_dataset(
            at(comm, 0, range(count)), comm, force_equal_length=equal
        )
        assert list(range(begin, end)) == examples(part)


# Mistakes of one rank, which are raised on all and name it: which data set or number
# the root gives, the arguments of the last rank, the error, and words.
MISTAKES = [
    (range(9), {"seed": -1}, ValueError, "seed must be from 0 to 4294967295, not -1"),
    (range(9), {"seed": 2**32}, ValueError, "seed must be from 0 to 4294967295"),
    (range(9), {"seed": 0.5}, TypeError, "seed must be an integer, not 0.5"),
    (range(9), {"max_buf_len": 2**31}, ValueError, "max_buf_len must be from 1 to 21"),
    (range(9), {"max_buf_len": 0}, ValueError, "max_buf_len must be from 1"),
    (range(9), {"root": 99}, ValueError, "root must be from 0"),
    (range(9), {"root": None}, TypeError, "root must be an integer, not None"),
    (None, {}, ValueError, "rank 0 is the root, so its data set must not be None"),
    (iter([]), {}, TypeError, "a list_iterator has not: pass a list"),
    ({1, 2}, {}, TypeError, "a set has not: pass a list"),
]


@pytest.mark.parametrize(("whole", "options", "error", "text"), MISTAKES)
def test_a_mistake_of_one_rank_is_an_error_on_all(comm, whole, options, error, text):
    culprit = comm.size - 1 if options else 0
    mine = options if comm.rank == culprit else {}
    given = whole if comm.rank == 0 else None
    expected = error if comm.rank == culprit else PeerError
    with pytest.raises(expected, match=re.escape(text)) as raised:
        scatter_dataset(given, comm, **mine)
    assert comm.rank == culprit or f"rank {culprit}: " in str(raised.value)
    part = scatter_dataset(at(comm, 0, np.arange(4)), comm)  # it still works
    assert len(part) == math.ceil(4 / comm.size)


def test_mistakes_in_scatter_index_are_told(comm):
    for count, error in ((-1, ValueError), ("9", TypeError)):
        with pytest.raises(error if comm.rank == 0 else PeerError, match="n_total_sam"):
            scatter_index(count, comm)
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
            scatter_dataset(at(comm, 0, whole), comm)
    assert len(scatter_dataset(at(comm, 0, np.arange(comm.size)), comm)) == 1


def test_an_empty_data_set_calls_the_model_without_arguments(naive):
    empty = create_empty_dataset(TupleDataset(np.zeros((6, 2)), np.zeros(6)))
    assert len(empty) == 6
    assert concat_examples(empty[:3]) == ()
    part = scatter_dataset(at(naive, 0, empty), naive)
    assert part[0] == ()
