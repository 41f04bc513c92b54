"""Taking examples out of a data set gives those examples, without the others."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from chainer.dataset import DatasetMixin
from chainer.datasets import (
    ConcatenatedDataset,
    DictDataset,
    ImageDataset,
    LabeledImageDataset,
    SubDataset,
    TransformDataset,
    TupleDataset,
    split_dataset_random,
)

from chainermn_train.parts import take

N = 40


class Opaque(DatasetMixin):
    """Only it knows how to divide itself."""

    def __len__(self):
        return N

    def get_example(self, i):
        assert type(i) is int
        return 3 * i


def double(example):
    return 2 * example


def array():
    return np.arange(N * 100.0).reshape(N, 100)


DIVISIBLE = {
    "array": array,
    "transposed array": lambda: np.asfortranarray(array()),
    "list": lambda: list(array()),
    "tuple": lambda: tuple(array()),
    "tuple data set": lambda: TupleDataset(array(), list(array())),
    "dict data set": lambda: DictDataset(a=array(), b=np.arange(N)),
    "sub data set": lambda: SubDataset(np.concatenate([array(), array()]), 7, 7 + N),
    "random sub data set": lambda: split_dataset_random(
        TupleDataset(np.concatenate([array(), array()])), N, seed=0
    )[1],
    "concatenated": lambda: ConcatenatedDataset(array()[:13], list(array()[13:14]), array()[14:]),
    "transformed": lambda: TransformDataset(array(), double),
    "nested": lambda: TransformDataset(SubDataset(ConcatenatedDataset(array()), 0, N), double),
}
INDICES = [
    [],
    [N - 1],
    list(range(10)),
    [30, 2, 17, 13, 39, 0],
    [5, 5, 13, 13, 5],
]


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return np.array_equal(a, b)


@pytest.mark.parametrize("kind", [*DIVISIBLE, "opaque"])
def test_the_part_has_the_examples_in_order(kind):
    whole = DIVISIBLE[kind]() if kind != "opaque" else Opaque()
    for chosen in INDICES:
        part = take(whole, np.array(chosen, dtype=np.int64))
        assert len(part) == len(chosen)
        for position, index in enumerate(chosen):
            assert equal(part[position], whole[index]), chosen


@pytest.mark.parametrize("kind", DIVISIBLE)
def test_the_part_does_not_contain_the_other_examples(kind):
    whole = DIVISIBLE[kind]()
    part = take(whole, np.array([1, 20]))
    assert len(pickle.dumps(part)) < 0.2 * len(pickle.dumps(whole))


def test_arrays_are_taken_as_arrays_of_their_own():
    whole = array()
    part = take(TupleDataset(whole, whole.astype(np.int16)), np.arange(5))
    first, second = part._datasets
    assert type(first) is np.ndarray
    assert second.dtype == np.int16
    assert not np.shares_memory(first, whole)


def test_a_memory_mapped_array_is_not_read_whole(tmp_path):
    whole = np.memmap(tmp_path / "data", np.float32, "w+", shape=(N, 2))
    whole[:] = np.arange(N)[:, None]
    part = take(whole, np.array([3, 30]))
    assert type(part) is np.ndarray
    np.testing.assert_array_equal(part, [[3, 3], [30, 30]])


def test_a_transformation_happens_when_an_example_is_used():
    calls: list[int] = []
    part = take(TransformDataset(list(range(N)), calls.append), np.array([4, 5]))
    assert calls == []
    _ = part[1]
    assert calls == [5]


def test_an_order_may_count_from_the_end():
    whole = SubDataset(list(range(4)), 0, 4, [-1, 0, -2, 1])
    assert list(take(whole, np.arange(4))) == [3, 0, 2, 1]


def test_of_image_data_sets_the_paths_are_taken():
    paths = [f"{i}.png" for i in range(N)]
    part = take(ImageDataset(paths, root="here"), np.array([3, 1]))
    assert (part._paths, part._root) == (["3.png", "1.png"], "here")
    pairs = take(LabeledImageDataset([(path, 7) for path in paths]), np.array([2]))
    assert pairs._pairs == [("2.png", 7)]


class NamedTuples(TupleDataset):
    """Finds its examples as its base does, whatever else it can do."""

    def __init__(self, name, *columns):
        super().__init__(*columns)
        self.name = name

    def labels(self):
        return [example[-1] for example in self]


class Doubled(TransformDataset):
    def __init__(self, dataset):
        super().__init__(dataset, double)


@pytest.mark.parametrize(
    "make", [lambda: NamedTuples("x", array(), range(N)), lambda: Doubled(array())]
)
def test_a_subclass_that_overrides_nothing_that_matters_is_taken_apart(make):
    whole = make()
    part = take(whole, np.array([30, 2]))
    assert len(part) == 2
    assert equal(part[0], whole[30])
    assert equal(part[1], whole[2])
    assert len(pickle.dumps(part)) < 0.2 * len(pickle.dumps(whole))


class Reversed(TupleDataset):
    def __getitem__(self, index):
        return super().__getitem__(len(self) - 1 - index)


class Halved(TransformDataset):
    def __len__(self):
        return super().__len__() // 2


class Squared(SubDataset):
    def get_example(self, i):
        return super().get_example(i) ** 2


class Below(Reversed):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: Reversed(list(range(N))),
        lambda: Halved(list(range(N)), double),
        lambda: Squared(list(range(N)), 0, N),
        lambda: Below(list(range(N))),
        lambda: np.ma.masked_array(np.arange(N), np.arange(N) < 3),
    ],
)
def test_a_subclass_that_finds_its_examples_otherwise_is_not_taken_apart(make):
    whole = make()
    part = take(whole, np.array([2, 5]))
    assert part._dataset is whole
    assert (part[0], part[1]) == (whole[2], whole[5])
