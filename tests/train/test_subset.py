"""Taking examples out of a data set gives those examples, without the others."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
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


def take(whole, indices):
    part = subset.divide(whole, indices, lambda source, chosen: source[chosen])
    return subset.view(whole, indices) if part is None else part


def double(example):
    return 2 * example


def array(n=N):
    return np.arange(n * 100.0).reshape(n, 100)


DIVISIBLE = {
    "tuple": lambda: tuple(array()),
    "tuple data set": lambda: TupleDataset(array(), list(array())),
    "dict data set": lambda: DictDataset(a=array(), b=np.arange(N)),
    "sub data set": lambda: SubDataset(array(2 * N), 7, 7 + N),
    "random sub data set": lambda: split_dataset_random(
        TupleDataset(array(2 * N)), N, 0
    )[1],
    "an order that counts from the end": lambda: SubDataset(
        array(), 0, N, [-1, 0, *range(2, N)]
    ),
    "nested": lambda: TransformDataset(
        SubDataset(ConcatenatedDataset(array()[:13], list(array())), 0, N), double
    ),
}
INDICES = [[], [N - 1], list(range(10)), [30, 2, 17, 13, 39, 0], [5, 5, 13, 13, 5]]


@pytest.mark.parametrize("kind", DIVISIBLE)
def test_the_part_has_the_examples_in_order_and_not_the_others(kind):
    whole = DIVISIBLE[kind]()
    for chosen in INDICES:
        part = take(whole, np.array(chosen, dtype=np.int64))
        assert len(part) == len(chosen)
        for position, index in enumerate(chosen):
            assert alike(part[position], whole[index]), chosen
    part = take(whole, np.array([1, 20]))
    assert len(pickle.dumps(part)) < 0.2 * len(pickle.dumps(whole))


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
NUMBERS = list(range(N))


@pytest.mark.parametrize(
    "make",
    [
        lambda: overriding(REVERSED)(NUMBERS),
        lambda: overriding(TransformDataset, __len__=lambda _: N // 2)(NUMBERS, double),
        lambda: overriding(SubDataset, get_example=lambda _, i: i**2)(NUMBERS, 0, N),
        lambda: np.ma.masked_array(np.arange(N), np.arange(N) < 3),
    ],
)
def test_a_subclass_that_finds_its_examples_otherwise_is_not_taken_apart(make):
    whole = make()
    part = take(whole, np.array([2, 5]))
    assert part._dataset is whole
    assert (part[0], part[1]) == (whole[2], whole[5])
