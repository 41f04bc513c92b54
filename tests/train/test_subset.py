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
    "tuple data set": lambda: TupleDataset(array(), list(array())),
    "dict data set": lambda: DictDataset(a=array(), b=np.arange(N)),
    "sub data set": lambda: SubDataset(array(2 * N), 7, 7 + N),
    "an order that counts from the end": lambda: SubDataset(
        array(), 0, N, [-1, 0, *range(2, N)]
    ),
    "nested": lambda: TransformDataset(
        SubDataset(ConcatenatedDataset(array()[:13], list(array())), 0, N), double
    ),
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

    name = "pair"


@pytest.mark.parametrize(
    ("whole", "attribute", "value"),
    [
        (ImageDataset([f"{i}.png" for i in range(N)], "here"), "_paths", ["2.png"]),
        (
            LabeledImageDataset([(f"{i}.png", i) for i in range(N)]),
            "_pairs",
            [("2.png", 2)],
        ),
        (NamedPair(range(N), list(range(N))), "name", "pair"),
    ],
)
def test_the_part_is_of_the_same_class_and_of_images_the_paths_are_taken(
    whole, attribute, value
):
    part = take(whole, np.array([2]))
    assert type(part) is type(whole)
    assert getattr(part, attribute) == value
    assert len(part) == 1


def overriding(base, **methods):
    return type("Overriding", (base,), methods)


NUMBERS = list(range(N))


@pytest.mark.parametrize(
    "make",
    [
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
