"""Means on one node whose bits don't depend on its being one node: sums in the order of ranks.

See docs/decisions/sums.md.
"""

from __future__ import annotations

from collections.abc import Callable

from ..arrays import accumulator
from .algorithm import Algorithm, Arrays, Dtypes, mean_apart


class RankOrdered(Algorithm):
    """Takes the means of what becomes 16 bits wide by messages, and of all else by shared memory.

    Only of the former an algorithm decides how they are rounded.
    """

    def __init__(self, by_messages: Algorithm, by_memory: Algorithm) -> None:
        """Own two algorithms that sum in the order of ranks."""
        self._by_messages, self._by_memory = by_messages, by_memory

    def mean(self, sources: Arrays, targets: Arrays, wire_dtypes: Dtypes) -> None:
        narrowed = _are_narrowed(targets, wire_dtypes)
        each = sources, targets, wire_dtypes
        mean_apart(self._by_messages, narrowed, self._by_memory, *each)

    def stage(self, sources: Arrays, targets: Arrays, wire_dtypes: Dtypes) -> Callable[[], None]:
        narrowed = any(_are_narrowed(targets, wire_dtypes))
        stage = super().stage if narrowed else self._by_memory.stage
        return stage(sources, targets, wire_dtypes)

    def close(self) -> None:
        self._by_messages.close()
        self._by_memory.close()


def _are_narrowed(arrays: Arrays, wire_dtypes: Dtypes) -> list[bool]:
    return [
        wire != array.dtype and wire != accumulator(wire)
        for array, wire in zip(arrays, wire_dtypes, strict=True)
    ]
