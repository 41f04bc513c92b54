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
)

from chainermn_train.datasets import subset
from tests.support.oracles.samples import alike

N = 40


def take(whole, indices):
    part = subset.divide(whole, indices, lambda source, chosen: source[chosen])
    if part is None:
        return subset.view(whole, indices)
    return part


def double(example):
    return 2 * example


def array(n=N):
    return np.arange(n * 100.0).reshape(n, 100)


def tuple_data_set():
    return TupleDataset(array(), list(array()))


def dict_data_set():
    return DictDataset(a=array(), b=np.arange(N))


def sub_data_set():
    return SubDataset(array(2 * N), 7, 7 + N)


def an_order_that_counts_from_the_end():
    return SubDataset(array(), 0, N, [-1, 0, *range(2, N)])


def nested():
    return TransformDataset(
        SubDataset(ConcatenatedDataset(array()[:13], list(array())), 0, N), double
    )


DIVISIBLE = {
    "tuple data set": tuple_data_set,
    "dict data set": dict_data_set,
    "sub data set": sub_data_set,
    "an order that counts from the end": an_order_that_counts_from_the_end,
    "nested": nested,
}
INDICES = [[], list(range(10)), [30, 2, 17, 13, 39, 0, 13]]


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


class NamedPair(TupleDataset):
    """Of a class of the user's own, which finds examples as its base does."""


@pytest.mark.parametrize(
    ("whole", "attribute", "value"),
    [
        (ImageDataset(["0.png", "1.png", "2.png"]), "_paths", ["2.png"]),
        (
            LabeledImageDataset([("2.png", i) for i in range(3)]),
            "_pairs",
            [("2.png", 2)],
        ),
        (NamedPair("012", [3, 4, 5]), "_length", 1),
    ],
)
def test_the_part_is_of_the_same_class_and_of_images_the_paths_are_taken(
    whole, attribute, value
):
    part = take(whole, np.array([2]))
    assert type(part) is type(whole)
    assert getattr(part, attribute) == value


class Halved(TransformDataset):
    def __len__(self):
        return N // 2


class Squared(SubDataset):
    def get_example(self, i):
        return i**2


@pytest.mark.parametrize(
    "whole",
    [
        Halved(range(N), double),
        Squared(range(N), 0, N),
        np.ma.masked_array(np.arange(N), np.arange(N) < 3),
    ],
)
def test_a_subclass_that_finds_its_examples_otherwise_is_not_taken_apart(whole):
    part = take(whole, np.array([2, 5]))
    assert part._dataset is whole
    # In tuples, since two masked elements are the same object, and neither true nor false.
    assert (part[0], part[1]) == (whole[2], whole[5])
