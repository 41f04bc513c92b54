"""What a plan asks of a transport: the verbs on flat buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np


class Transport(ABC):
    """Moves 1-D contiguous arrays among the ranks of one group (all methods collective).

    Sums are taken in rank order, in float32 or wider, so every rank gets the same bits.
    """

    rank: int
    size: int

    @abstractmethod
    def allreduce(self, buffer: np.ndarray, divisor: int = 1) -> np.ndarray:
        """The sum of all ranks' buffers divided by ``divisor``.

        Args:
            buffer: 1-D, contiguous, native byte order, any numeric dtype; overwritten.
            divisor: applied before the sum is rounded to the buffer's dtype, so that a mean
                that can be represented doesn't overflow on the way.

        Returns:
            The array that holds the result: here, ``buffer`` itself.
        """

    @abstractmethod
    def bcast(self, buffer: np.ndarray, root: int) -> np.ndarray:
        """Overwrite ``buffer`` (1-D, contiguous, writable) by ``root``'s."""

    def close(self) -> None:  # noqa: B027  (optional: a transport may own nothing)
        """Release what the transport owns."""
