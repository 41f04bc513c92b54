"""An order sampler whose orders a snapshot determines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from chainer.iterators import OrderSampler

# How many numbers are drawn for a seed: there are 32! orders (118 bits).
SEED_NUMBERS = 32


class ResumableOrderSampler(OrderSampler):
    """Shuffles so that each epoch's order follows from the order of the epoch before.

    With this sampler, a resumed run sees the same batches as a run that was never
    interrupted, whenever either run saves::

        MultiprocessIterator(dataset, 32, order_sampler=ResumableOrderSampler())

    Without it, an iterator draws its next order from a random generator. A checkpoint
    holds the generator's state, which is enough for a ``SerialIterator``, and for a
    ``MultithreadIterator`` if both runs save at the same iterations. It is not enough
    for a ``MultiprocessIterator``, whose thread may draw at any time.

    The order 0, 1, 2, ... never occurs.

    Args:
        seed: determines the first order after the iterator is made or reset: an integer
            from 0 to 2**32 - 1, or a sequence of such integers. None for a seed drawn
            from NumPy's global generator.

    Raises:
        TypeError, ValueError: ``seed`` is not as above.
    """

    def __init__(self, seed: int | Sequence[int] | None = None) -> None:
        if seed is None:
            seed = np.random.permutation(SEED_NUMBERS).tolist()
        words = np.atleast_1d(seed)
        if words.dtype.kind not in "iu":
            raise TypeError(
                f"seed must be an integer, several of them, or None, not {seed!r}"
            )
        self._seed = words.tolist()
        np.random.RandomState(self._seed)  # raises if it is out of range
        self._resets = 0

    def __call__(self, current_order: np.ndarray, current_position: int) -> np.ndarray:
        """Return the order of the next epoch, an int64 array with the shape of ``current_order``.

        ``current_order`` is the order of the epoch that ends, or for a reset 0, 1, 2, and
        so on. ``current_position`` has no influence.
        """
        seed = current_order
        # Nothing may depend on how many orders have been drawn ahead: only resets are
        # counted, and only a reset begins with the order of the indices.
        if np.array_equal(current_order, np.arange(len(current_order))):
            seed = np.array([*self._seed, self._resets])
            self._resets += 1
        return shuffled(seed, len(current_order))


def shuffled(seed: Any, count: int) -> np.ndarray:
    """Return the permutation that follows from a seed, but never a reset's order, 0, 1, 2..."""
    generator = np.random.RandomState(seed)  # whose stream NumPy has frozen
    order = generator.permutation(count)
    while count > 1 and np.array_equal(order, np.arange(count)):
        order = generator.permutation(count)
    return order
