"""Means on one node whose bits don't depend on its being one node: sums in the order of ranks.

See docs/decisions/sums.md.
"""

from __future__ import annotations

from collections.abc import Callable

from ..arrays import accumulator
from .algorithm import Algorithm, Operand, allreduce_apart


class RankOrdered(Algorithm):
    """Takes the means of what becomes 16 bits wide by messages, and of all else by shared memory.

    Only of the former an algorithm decides how they are rounded.
    """

    def __init__(self, by_messages: Algorithm, by_memory: Algorithm) -> None:
        """Own two algorithms that sum in the order of ranks."""
        self._by_messages, self._by_memory = by_messages, by_memory

    def allreduce(self, operand: Operand) -> None:
        allreduce_apart(self._by_messages, _are_narrowed(operand), self._by_memory, operand)

    def prepare(self, operand: Operand) -> Callable[[], None]:
        narrowed = any(_are_narrowed(operand))
        return super().prepare(operand) if narrowed else self._by_memory.prepare(operand)

    def close(self) -> None:
        self._by_messages.close()
        self._by_memory.close()


def _are_narrowed(operand: Operand) -> list[bool]:
    return [
        wire != array.dtype and wire != accumulator(wire)
        for array, wire in zip(operand.targets, operand.wire_dtypes, strict=True)
    ]
