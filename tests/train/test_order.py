"""The resumable order sampler shuffles, and goes on from an order alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from chainer.iterators import MultithreadIterator, SerialIterator
from chainer.serializers import load_npz, save_npz

from chainermn_train import ResumableOrderSampler


def test_a_seed_that_is_no_integer_is_named():
    for seed in 1.7, "x", [1, 2.5], [], [[1, 2]], {1}, True:
        with pytest.raises(TypeError, match="must be an integer, several of them, or None") as e:
            ResumableOrderSampler(seed)
        assert repr(seed) in str(e.value)


def test_integers_of_all_sorts_are_seeds():
    for seed in 0, 2**32 - 1, np.uint32(5), [1, 2], (3,), np.arange(2):
        order = ResumableOrderSampler(seed)(np.arange(9), 0)
        assert sorted(order) == list(range(9))


def orders(iterator, epochs):
    n = len(iterator.dataset)
    return [[int(next(iterator)[0]) for _ in range(n)] for _ in range(epochs)]


def test_every_order_but_that_of_the_indices_is_about_as_likely():
    """2,300 orders of 4 examples from as many seeds: each of 23 comes 100 times or so."""
    indices = np.arange(4)
    found = [tuple(ResumableOrderSampler(seed)(indices, 0).tolist()) for seed in range(2300)]
    counts = Counter(found).values()
    assert len(counts) == 23
    assert (0, 1, 2, 3) not in found
    assert 60 < min(counts) <= max(counts) < 140


def test_orders_of_an_iterator_differ_between_epochs_resets_and_seeds():
    found = []
    for seed in (1, 2):
        iterator = SerialIterator(np.arange(9), 1, order_sampler=ResumableOrderSampler(seed))
        for _ in range(3):
            found += orders(iterator, 3)
            iterator.reset()
    assert all(sorted(order) == list(range(9)) for order in found)
    assert len(set(map(tuple, found))) == 18


@pytest.mark.parametrize("kind", [SerialIterator, MultithreadIterator])
@pytest.mark.parametrize("position", [0, 4, 8, 9, 10])
def test_an_iterator_goes_on_from_what_it_saved(kind, position, tmp_path):
    first = kind(np.arange(9), 1, order_sampler=ResumableOrderSampler())
    for _ in range(position):
        next(first)
    save_npz(tmp_path / "state.npz", first)
    second = kind(np.arange(9), 1, order_sampler=ResumableOrderSampler())
    load_npz(tmp_path / "state.npz", second)
    assert orders(second, 5) == orders(first, 5)


def test_few_examples():
    sampler = ResumableOrderSampler(3)
    for n in range(3):
        order = np.arange(n)
        for _ in range(3):
            order = sampler(order, 0)
            assert sorted(order) == list(range(n))
            assert order.dtype == np.int64


def test_seeds():
    indices = np.arange(20)

    def first(seed):
        return ResumableOrderSampler(seed)(indices, 0).tolist()

    assert first(5) == first([5]) == first(np.int32(5)) != first([5, 6])
    np.random.seed(0)
    drawn = first(None)
    assert drawn != first(None)
    np.random.seed(0)
    assert drawn == first(None)
    for bad in (-1, 2**32):
        with pytest.raises(ValueError, match=r"\w"):
            ResumableOrderSampler(bad)
