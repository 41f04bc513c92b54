"""An order sampler whose orders a snapshot determines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from chainer.iterators import OrderSampler

# Numbers that are drawn for a seed: their order is one of 32! (118 bits).
SEED_NUMBERS = 32


class ResumableOrderSampler(OrderSampler):
    """Shuffles; each epoch's order follows from that of the epoch before.

    Iterators save the order that they are in, but not the generator that they draw the next one
    from. A checkpoint holds the generator, which is enough for a ``SerialIterator``. It is enough
    for a ``MultithreadIterator``, too, if the other run saves at the same iterations: each save
    drops the examples that were fetched ahead, and may draw their order anew. It is not enough for
    a ``MultiprocessIterator``, whose thread may draw at any time. With this sampler each of them
    sees the same batches after a resume as in a run that was never interrupted, and never saved::

        MultiprocessIterator(dataset, 32, order_sampler=ResumableOrderSampler())

    The order of the indices themselves never comes up.

    Args:
        seed: of the first order after the iterator is made or reset: an integer from 0
            to 2**32 - 1, or several. None for one drawn from NumPy's global generator.

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
        """Return the order of the next epoch, int64; ``current_position`` has no influence.

        ``current_order`` is the order of the epoch that ends, or for a reset all
        indices in their order.
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
