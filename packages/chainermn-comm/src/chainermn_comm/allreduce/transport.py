"""What a plan asks of a transport: the verbs on flat buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np


class Transport(ABC):
    """Moves 1-D contiguous arrays among the ranks of one group (all methods collective).

    Sums are taken in rank order, in float32 or wider, so every rank gets the same bits.
    """

    rank: int
    size: int

    @abstractmethod
    def allreduce(self, buffers: Sequence[np.ndarray], divisor: int = 1, lag: int = 0) -> None:
        """Overwrite each buffer by the sum of all ranks' buffers divided by ``divisor``.

        Args:
            buffers: each 1-D, contiguous, any numeric dtype; the same
                lengths and dtypes on all ranks.
            divisor: applied before a sum is rounded to the buffer's dtype, so that a mean that
                can be represented doesn't overflow on the way.
            lag: so many chunks later a chunk's sums are handed round. Where reading what another
                core has just written is slow, a lag of 2 halves the time; elsewhere it costs a
                quarter more.
        """

    @abstractmethod
    def bcast(self, buffer: np.ndarray, root: int) -> None:
        """Overwrite ``buffer`` (1-D, contiguous, writable) by ``root``'s."""

    def close(self) -> None:  # noqa: B027  (optional: a transport may own nothing)
        """Release what the transport owns."""
