"""Data sets are divided among the ranks: each example where it belongs, and nowhere else."""

from __future__ import annotations

import copy
import math
import pickle
import re
from typing import ClassVar

import chainer
import numpy as np
import pytest
from chainer.dataset import DatasetMixin, concat_examples
from chainer.datasets import (
    ConcatenatedDataset,
    DictDataset,
    SubDataset,
    TransformDataset,
    TupleDataset,
)
from chainer.iterators import SerialIterator

from chainermn_comm import CommunicatorBase, PeerError
from chainermn_train import (
    DataSizeError,
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
    n_channels = 3

    def __init__(self, begin=0, count=10):
        self.numbers = range(begin, begin + count)

    def __len__(self):
        return len(self.numbers)

    def get_example(self, i):
        return self.file, self.numbers[i]


class NamedPair(TupleDataset):
    """Of a class of the user's own, which ranks divide."""

    n_channels = 1


class NamedChain(ConcatenatedDataset):
    n_channels = 1


class NamedTransform(TransformDataset):
    n_channels = 1


class NamedPart(SubDataset):
    n_channels = 1


KINDS = {
    "array": lambda n: np.arange(3 * n, dtype=np.float32).reshape(n, 3),
    "list": lambda n: [f"example {i}" for i in range(n)],
    "tuple data set": lambda n: TupleDataset(np.arange(n) / 2, list(range(n))),
    "dict data set": lambda n: DictDataset(
        x=np.arange(n), t=np.arange(n, dtype=np.int8)
    ),
    "sub data set": lambda n: SubDataset(
        np.arange(n + 4), 2, n + 2, np.arange(n + 4)[::-1]
    ),
    "dict of all indices": lambda n: {i: f"example {i}" for i in range(n)},
    "computed": Squares,
    "range": range,
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
        assert isinstance(part, SubDataset)
        assert len(part) in (count // naive.size, math.ceil(count / naive.size))
        assert everything(naive, part) == examples(whole)

        equal = scatter_dataset(at(naive, 0, whole), naive)
        assert len(equal) == math.ceil(count / naive.size)
        received = everything(naive, equal)
        assert all(example in received for example in examples(whole))
        assert len(received) - count < naive.size


def through(*attributes):
    """Return a function that follows attributes from a data set; a number is an index."""

    def follow(dataset):
        for each in attributes:
            dataset = dataset[each] if isinstance(each, int) else vars(dataset)[each]
        return dataset

    return follow


# Data sets that can't be divided, and where the user's objects are in the result.
WHOLE = {
    "own": (Opened, through("_dataset")),
    "two": (
        lambda: ConcatenatedDataset(Opened(0, 4), Opened(4, 6)),
        through("_dataset", "_datasets", 1),
    ),
    "part of one": (
        lambda: SubDataset(Opened(), 2, 9, [*range(9, -1, -1)]),
        through("_dataset", "_dataset"),
    ),
    "transformed": (
        lambda: TransformDataset(Opened(), str),
        through("_dataset", "_dataset"),
    ),
    "columns": (
        lambda: TupleDataset(Opened(), Opened(10)),
        through("_dataset", "_datasets", 1),
    ),
}
# Where beside it there is what can be divided.
MIXED = {
    "beside labels": (
        lambda: TupleDataset(Opened(), np.arange(10)),
        through("_dataset", "_datasets", 0, "_dataset"),
    ),
    "before an array": (
        lambda: ConcatenatedDataset(Opened(), np.arange(7)),
        through("_dataset", "_datasets", 0),
    ),
}
# Of a class of the user's own, and divided.
DIVIDED = {
    "columns": lambda: NamedPair(np.arange(9), np.arange(9)),
    "concatenated": lambda: NamedChain(np.arange(4), np.arange(5)),
    "transformed": lambda: NamedTransform(np.arange(9), abs),
    "part": lambda: NamedPart(np.arange(12), 1, 10),
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", WHOLE)
def test_what_only_its_class_can_divide_is_behind_the_result(naive, kind, shuffle):
    """As ChainerMN gave it, so that scripts read and set its attributes."""
    make, find = WHOLE[kind]
    whole = make()
    part = scatter_dataset(at(naive, 0, whole), naive, shuffle=shuffle, seed=4)
    count = len(whole)
    order = np.random.RandomState(4).permutation(count) if shuffle else range(count)
    begin, end = scatter_index(count, naive)
    expected = SubDataset(whole, begin, end, order)
    assert type(part) is SubDataset
    assert type(part._dataset) is type(whole)
    assert (part._start, part._finish) == (begin, end)
    assert (part._order is None) == (not shuffle)
    assert part._order is None or list(part._order) == list(order)
    assert examples(part) == examples(expected)
    if naive.rank == 0:
        assert part._dataset is whole
    assert find(part).n_channels == 3
    find(part).file = "opened"
    find(expected).file = "opened"
    assert examples(part) == examples(expected)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", MIXED)
def test_what_only_its_class_can_divide_may_be_beside_what_is_divided(
    naive, kind, shuffle
):
    make, find = MIXED[kind]
    whole = make()
    part = scatter_dataset(at(naive, 0, whole), naive, shuffle=shuffle, seed=4)
    order = np.random.RandomState(4).permutation(len(whole)) if shuffle else None
    expected = SubDataset(whole, *scatter_index(len(whole), naive), order)
    assert examples(part) == examples(expected)
    assert type(part._dataset) is type(whole)
    assert find(part).n_channels == 3
    find(part).file = "opened"
    whole._datasets[0].file = "opened"
    assert examples(part) == examples(expected)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", DIVIDED)
def test_a_class_of_the_user_s_own_that_is_divided_stays_one(naive, kind, shuffle):
    whole = DIVIDED[kind]()
    whole.root = "here"
    part = scatter_dataset(at(naive, 0, whole), naive, shuffle=shuffle, seed=4)
    order = np.random.RandomState(4).permutation(9) if shuffle else None
    expected = SubDataset(whole, *scatter_index(9, naive), order)
    assert examples(part) == examples(expected)
    assert type(part._dataset) is type(whole)
    assert part._dataset.n_channels == 1
    assert part._dataset.root == "here"


def test_of_a_shared_data_set_attributes_are_there_too(naive):
    shared = share_dataset(at(naive, 0, Opened()), naive)
    assert shared.n_channels == 3
    shared.file = "opened"
    assert examples(shared) == [("opened", i) for i in range(10)]


@pytest.mark.sizes(2, 3, 4)
def test_a_seed_gives_ranks_the_examples_that_chainer_7_gave_them(naive):
    """The first ranks have the longer parts; these are what Chainer 7.8.1 answered."""
    parts = {
        2: ([3, 4, 1], [0, 2]),
        3: ([3, 4], [1, 0], [2]),
        4: ([3, 4], [1], [0], [2]),
    }[naive.size]
    part = scatter_dataset(
        range(5), naive, shuffle=True, seed=3, force_equal_length=False
    )
    assert examples(part) == parts[naive.rank]
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    found = scatter_index(5, naive, force_equal_length=False)
    assert found == (ends[naive.rank], ends[naive.rank + 1])
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


@pytest.mark.parametrize("kind", [WithoutSplit, Lacking])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("dataset", ["array", "list", "tuple data set", "computed"])
def test_a_communicator_without_split_scatters(world, naive, kind, shuffle, dataset):
    """Messages of its user may be under way meanwhile."""
    comm, whole = kind(world), KINDS[dataset](10)
    others = [rank for rank in range(comm.size) if rank]
    if comm.rank == 0:
        for rank in others:
            comm.send_obj("under way", rank, 0)
    how = {"shuffle": shuffle, "seed": 3, "force_equal_length": False}
    part = scatter_dataset(at(comm, 0, whole), comm, **how)
    expected = scatter_dataset(at(naive, 0, whole), naive, **how)
    assert examples(part) == examples(expected)
    if comm.rank:
        assert comm.recv_obj(0, 0) == "under way"


def test_what_needs_split_says_so(world):
    comm = Lacking(world)
    with pytest.raises(NotImplementedError, match="Lacking has no split"):
        share_dataset(at(comm, 0, np.arange(4)), comm)


def test_an_mpi4py_communicator_scatters(world, naive):
    part = scatter_dataset(at(naive, 0, np.arange(10)), world, force_equal_length=False)
    assert everything(naive, part) == list(range(10))
    assert world.allreduce(1) == naive.size  # it is still the caller's


@pytest.mark.parametrize("count", [8, 80_000])
def test_arrays_are_no_longer_the_roots(naive, count):
    whole = np.zeros((count, 2))
    part = scatter_dataset(at(naive, 0, whole), naive)
    whole[:] = 1
    naive.allgather_obj(None)
    assert not part[0].any()


X = np.arange(12, dtype=np.float32).reshape(4, 3)
CHANGED = {  # each has the examples of X, which `row` finds
    "array": (X, lambda example: example),
    "tuple data set": (TupleDataset(X, np.arange(4)), lambda example: example[0]),
    "dict data set": (DictDataset(x=X, t=np.arange(4)), lambda example: example["x"]),
    "pairs": ([(x.copy(), i) for i, x in enumerate(X)], lambda example: example[0]),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_examples_can_be_changed_in_place_and_no_other_ranks_change(naive, kind):
    """Each rank has the same four examples."""
    whole, row = CHANGED[kind]
    part = scatter_dataset(
        at(naive, 0, ConcatenatedDataset(*[whole] * naive.size)), naive
    )
    example = row(part[0])
    example += 1 + naive.rank
    row(part[1:3][0])[:] = -naive.rank
    naive.allgather_obj(None)
    expected = X.copy()
    expected[0] += 1 + naive.rank
    expected[1] = -naive.rank
    np.testing.assert_array_equal([row(each) for each in part], expected)
    for twin in copy.deepcopy(part), pickle.loads(pickle.dumps(part)):
        np.testing.assert_array_equal([row(each) for each in twin], expected)
        row(twin[2])[:] = 9
    np.testing.assert_array_equal([row(each) for each in part], expected)
    batch = np.asarray(concat_examples([row(each) for each in part]))
    batch *= 2
    np.testing.assert_array_equal(row(part[3]), X[3])


def test_a_transform_may_change_its_example_in_place(naive):
    """What it does stays, as in a data set that was not scattered."""
    x, t = np.ones((8, 3), np.float32), np.arange(8)

    def double(example):
        x, t = example
        x *= 2
        return x, t

    whole = at(naive, 0, TupleDataset(x.copy(), t))
    part = TransformDataset(scatter_dataset(whole, naive), double)
    for epoch in range(2):
        iterator = SerialIterator(part, 3, repeat=False)
        for batch in iterator:
            xs, _ = concat_examples(batch)
            np.testing.assert_array_equal(xs, 2.0 ** (epoch + 1))


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


@pytest.mark.sizes(2, 3, 4)
def test_a_users_message_on_its_way_arrives_unharmed(comm):
    """Under any tag: 23719 was the library's own once."""
    whole, last, tags = (
        TupleDataset(np.arange(9), list(range(9))),
        comm.size - 1,
        (23719, 0),
    )
    if comm.rank == 0:
        for tag in tags:
            comm.send(np.array([float(tag)]), last, tag)
    part = scatter_dataset(at(comm, 0, whole), comm, force_equal_length=False)
    assert everything(comm, part) == [(i, i) for i in range(9)]
    if comm.rank == last:
        assert [comm.recv(0, tag).tolist() for tag in tags] == [[23719.0], [0.0]]


def test_a_seed_gives_the_same_subsets_always(naive):
    whole = list(range(1000))
    parts = [
        examples(scatter_dataset(at(naive, 0, whole), naive, shuffle=True, seed=seed))
        for seed in (42, 42, np.uint32(42), 43, 2**32 - 1)
    ]
    assert parts[0] == parts[1] == parts[2]
    assert parts[3] != parts[0] != parts[4]
    if naive.rank == 0:  # on every machine and NumPy: its legacy stream is frozen
        assert parts[0][:5] == [521, 737, 740, 660, 411]


def test_every_example_is_given_in_random_order(naive):
    def scattered():
        whole = at(naive, 0, np.arange(100))
        return everything(
            naive, scatter_dataset(whole, naive, 0, True, force_equal_length=False)
        )

    first, second = scattered(), scattered()
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert first != list(range(100))


@pytest.mark.parametrize("equal", [True, False])
def test_scatter_index_gives_the_ranges_that_scatter_dataset_gives(comm, equal):
    for count in 0, 1, 10, 13:
        n = count if comm.rank == 0 else -1  # ignored
        begin, end = scatter_index(n, comm, force_equal_length=equal)
        part = scatter_dataset(
            at(comm, 0, range(count)), comm, force_equal_length=equal
        )
        assert list(range(begin, end)) == examples(part)


def test_scatter_index_with_an_mpi4py_communicator_and_another_root(world):
    last = world.size - 1
    begin, end = scatter_index(world.rank * 8, world, root=last)
    assert (begin, end) == (8 * last * world.rank // world.size, end)
    assert end - begin == math.ceil(8 * last / world.size)


# Mistakes: raised on all ranks, naming the one that made it.


def fails_everywhere(comm, culprit, error, text, scatter, *arguments, **options):
    expected = error if comm.rank == culprit else PeerError
    with pytest.raises(expected, match=re.escape(text)) as raised:
        scatter(*arguments, comm, **options)
    assert comm.rank == culprit or f"rank {culprit}: " in str(raised.value)
    part = scatter_dataset(at(comm, 0, np.arange(4)), comm)  # it still works
    assert len(part) == math.ceil(4 / comm.size)


def test_a_wrong_argument_on_one_rank_is_an_error_on_all(comm):
    last = comm.size - 1
    for wrong, error, text in [
        ({"seed": -1}, ValueError, "seed must be from 0 to 4294967295, not -1"),
        (
            {"seed": 2**32},
            ValueError,
            "seed must be from 0 to 4294967295, not 4294967296",
        ),
        ({"seed": 0.5}, TypeError, "seed must be an integer, not 0.5"),
        (
            {"max_buf_len": 2147483648},
            ValueError,
            "max_buf_len must be from 1 to 2147483647",
        ),
        ({"max_buf_len": 0}, ValueError, "max_buf_len must be from 1"),
        ({"root": 99}, ValueError, "root must be from 0"),
        ({"root": -1}, ValueError, "root must be from 0"),
        ({"root": None}, TypeError, "root must be an integer, not None"),
    ]:
        options = wrong if comm.rank == last else {}
        fails_everywhere(comm, last, error, text, scatter_dataset, range(9), **options)


def test_a_root_without_examples_or_their_number_is_told_on_all(comm):
    for scatter, given, error, text in [
        (
            scatter_dataset,
            None,
            ValueError,
            "rank 0 is the root, so its data set must not be None",
        ),
        (scatter_dataset, iter([]), TypeError, "list_iterator has none"),
        (scatter_dataset, {1, 2}, TypeError, "those of this set have not"),
        (scatter_dataset, {"a": 1, "b": 2}, TypeError, "those of this dict have not"),
        (scatter_dataset, {}.keys(), TypeError, "those of this dict_keys have not"),
        (scatter_index, -1, ValueError, "n_total_samples must be at least 0"),
        (scatter_index, "9", TypeError, "not '9'"),
    ]:
        fails_everywhere(
            comm, 0, error, text, scatter, given if comm.rank == 0 else range(3)
        )


@pytest.mark.sizes(2, 3, 4)
def test_ranks_that_name_different_roots_are_told(comm):
    for scatter, given in (scatter_dataset, range(9)), (scatter_index, 9):
        with pytest.raises(
            ValueError, match="disagree on root: 0 on rank 0; 1 on rank"
        ):
            scatter(given, comm, root=min(1, comm.rank))


class Unreadable(list):
    """A list that cannot be pickled; a subclass is sent as it is."""

    def __reduce_ex__(self, protocol):
        raise OSError("disk failure")


@pytest.mark.sizes(2, 3, 4)
def test_a_part_that_cannot_be_pickled_or_unpickled_is_an_error_on_all(comm):
    last = comm.size - 1
    for culprit, error, text, whole in [
        # Others got theirs.
        (0, ValueError, "does not travel", [*range(last), Awkward("there")]),
        (0, OSError, "disk failure", Unreadable([1, 2])),
        (last, ValueError, "does not arrive", [*range(last), Awkward("here")]),
    ]:
        fails_everywhere(comm, culprit, error, text, scatter_dataset, whole)


def test_something_else_than_a_communicator_is_named():
    with pytest.raises(TypeError, match=r"scatter_dataset, unless .* mpi4py .*not str"):
        scatter_dataset([1], "naive")
    with pytest.raises(TypeError, match=r"scatter_index, unless .*not NoneType"):
        scatter_index(1, None)


def test_an_empty_data_set_calls_the_model_without_arguments(naive):
    whole = TupleDataset(np.zeros((6, 2)), np.zeros(6))
    empty = create_empty_dataset(whole)
    assert len(empty) == 6
    assert concat_examples(empty[:3]) == ()
    calls = []

    class Silent(chainer.Chain):
        def __call__(self, *args, **kwds):
            calls.append((args, kwds))
            return chainer.Variable(np.zeros((), np.float32))

    optimizer = chainer.optimizers.SGD().setup(Silent())
    iterator = chainer.iterators.SerialIterator(empty, 3)
    chainer.training.StandardUpdater(iterator, optimizer).update()
    assert calls == [((), {})]
    part = scatter_dataset(at(naive, 0, empty), naive)
    assert part[0] == ()


def test_nothing_raises_what_scripts_may_catch():
    assert issubclass(DataSizeError, RuntimeError)
