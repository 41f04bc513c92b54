"""The resumable order sampler shuffles, and goes on from an order alone."""

from __future__ import annotations

import numpy as np
import pytest
from chainer.iterators import MultithreadIterator, SerialIterator
from chainer.serializers import load_npz, save_npz

from chainermn_train import ResumableOrderSampler


def order_of(seed, n=20):
    return ResumableOrderSampler(seed)(np.arange(n), 0).tolist()


def test_seeds():
    for seed in 2**32 - 1, np.uint32(5), [1, 2]:
        assert sorted(order_of(seed)) == list(range(20))
    drawn = []
    for seed in 0, 0, 1:
        np.random.seed(seed)
        drawn.append(order_of(None))
    assert drawn[0] == drawn[1] != drawn[2]
    for bad in -1, 2**32, "x", []:
        with pytest.raises((TypeError, ValueError), match=r"[sS]eed"):
            ResumableOrderSampler(bad)


def orders(iterator, epochs):
    n = len(iterator.dataset)
    return [[int(next(iterator)[0]) for _ in range(n)] for _ in range(epochs)]


def test_orders_of_an_iterator_differ_between_epochs_resets_and_seeds():
    found = []
    for seed in (1, 2):
        sampler = ResumableOrderSampler(seed)
        iterator = SerialIterator(range(9), 1, order_sampler=sampler)
        for _ in range(3):
            found += orders(iterator, 3)
            iterator.reset()
    assert len({tuple(order) for order in found}) == 18


@pytest.mark.parametrize("kind", [SerialIterator, MultithreadIterator])
@pytest.mark.parametrize("position", [0, 8, 9, 10])
def test_an_iterator_goes_on_from_what_it_saved(kind, position, tmp_path):
    """With the batches of one that never saved, too."""

    def make(seed):
        return kind(range(9), 1, order_sampler=ResumableOrderSampler(seed))

    first = make(7)
    second = make(8)
    third = make(7)
    for _ in range(position):
        assert next(first) == next(third)
    save_npz(tmp_path / "state.npz", first)
    load_npz(tmp_path / "state.npz", second)
    assert orders(second, 5) == orders(first, 5) == orders(third, 5)


@pytest.mark.parametrize("n", range(3))
def test_few_examples(n):
    assert sorted(order_of(3, n)) == list(range(n))
