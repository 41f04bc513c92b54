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

from chainermn_train.datasets import subset
from tests.support.oracles.alike import alike

N = 40


def rows(source, indices):
    """Copies, so that the part doesn't keep the whole alive."""
    return source[indices]


def take(whole, indices):
    part = subset.divide(whole, indices, rows)
    return subset.view(whole, indices) if part is None else part


class Unsplittable(DatasetMixin):
    """Only it knows how to divide itself."""

    def __len__(self):
        return N

    def get_example(self, i):
        assert type(i) is int
        return 3 * i


def double(example):
    return 2 * example


def array(n=N):
    return np.arange(n * 100.0).reshape(n, 100)


class NamedTuples(TupleDataset):
    """Finds its examples as its base does, whatever else it can do."""

    def __init__(self, name, *columns):
        super().__init__(*columns)
        self.name = name


class Doubled(TransformDataset):
    def __init__(self, dataset):
        super().__init__(dataset, double)


DIVISIBLE = {
    "array": array,
    "transposed array": lambda: np.asfortranarray(array()),
    "list": lambda: list(array()),
    "tuple": lambda: tuple(array()),
    "tuple data set": lambda: TupleDataset(array(), list(array())),
    "dict data set": lambda: DictDataset(a=array(), b=np.arange(N)),
    "sub data set": lambda: SubDataset(array(2 * N), 7, 7 + N),
    "random sub data set": lambda: split_dataset_random(
        TupleDataset(array(2 * N)), N, 0
    )[1],
    "concatenated": lambda: ConcatenatedDataset(
        array()[:13], list(array()[13:14]), array()[14:]
    ),
    "transformed": lambda: TransformDataset(array(), double),
    "nested": lambda: TransformDataset(
        SubDataset(ConcatenatedDataset(array()), 0, N), double
    ),
    "a subclass": lambda: NamedTuples("x", array(), range(N)),
    "another subclass": lambda: Doubled(array()),
}
INDICES = [[], [N - 1], list(range(10)), [30, 2, 17, 13, 39, 0], [5, 5, 13, 13, 5]]


@pytest.mark.parametrize("kind", [*DIVISIBLE, "unsplittable"])
def test_the_part_has_the_examples_in_order_and_not_the_others(kind):
    whole = DIVISIBLE[kind]() if kind != "unsplittable" else Unsplittable()
    for chosen in INDICES:
        part = take(whole, np.array(chosen, dtype=np.int64))
        assert len(part) == len(chosen)
        for position, index in enumerate(chosen):
            assert alike(part[position], whole[index]), chosen
    part = take(whole, np.array([1, 20]))
    assert kind == "unsplittable" or len(pickle.dumps(part)) < 0.2 * len(
        pickle.dumps(whole)
    )


def test_arrays_are_taken_as_arrays_of_their_own_and_mapped_ones_are_not_read_whole(
    tmp_path,
):
    whole = array()
    mapped = np.memmap(tmp_path / "data", np.int16, "w+", shape=(N, 2))
    mapped[:] = np.arange(N)[:, None]
    first, second = take(TupleDataset(whole, mapped), np.array([3, 30]))._datasets
    assert type(first) is type(second) is np.ndarray
    assert not np.shares_memory(first, whole)
    assert (second.dtype, second.tolist()) == (np.int16, [[3, 3], [30, 30]])


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


def overriding(base, **methods):
    return type("Overriding", (base,), methods)


REVERSED = overriding(
    TupleDataset, __getitem__=lambda self, i: self._datasets[0][-1 - i]
)


@pytest.mark.parametrize(
    "make",
    [
        lambda: REVERSED(list(range(N))),
        lambda: overriding(TransformDataset, __len__=lambda _: N // 2)(
            list(range(N)), double
        ),
        lambda: overriding(SubDataset, get_example=lambda _, i: i**2)(
            list(range(N)), 0, N
        ),
        lambda: overriding(REVERSED)(list(range(N))),
        lambda: np.ma.masked_array(np.arange(N), np.arange(N) < 3),
    ],
)
def test_a_subclass_that_finds_its_examples_otherwise_is_not_taken_apart(make):
    whole = make()
    part = take(whole, np.array([2, 5]))
    assert part._dataset is whole
    assert (part[0], part[1]) == (whole[2], whole[5])
