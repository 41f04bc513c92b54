"""Some arrays are summed by one algorithm, and the others by another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..layout import NextOperand, Operand
from ..messaging import Algorithm
from ..numbers import accumulator, overflow_errstate
from .bucketed import Bucketed
from .circulant import CirculantAllreduce
from .pairwise import Pair, PairwiseAllreduce

# Arrays of this size and more, if they travel in their own dtype, go from rank to rank
# in place.
IN_PLACE_BYTES = 1 << 20


def is_narrowed(target: np.ndarray, wire: np.dtype) -> bool:
    """Return whether the array becomes 16 bits wide: an algorithm decides how it is rounded."""
    return wire != target.dtype and wire != accumulator(wire)


class Partitioned(Algorithm):
    """Sums the arrays that are chosen by one algorithm, and then the rest by another."""

    def __init__(
        self,
        is_chosen: Callable[[np.ndarray, np.dtype], bool],
        chosen: Algorithm,
        rest: Algorithm,
    ) -> None:
        """Own the algorithms; ``is_chosen`` says of a target and its wire dtype which it takes."""
        self._is_chosen, self._chosen, self._rest = is_chosen, chosen, rest

    def allreduce(self, operand: Operand) -> None:
        choices = self._choices(operand)
        for algorithm, wanted in ((self._chosen, True), (self._rest, False)):
            indices = [
                index for index, choice in enumerate(choices) if choice == wanted
            ]
            if indices:
                algorithm.allreduce(operand.only(indices))

    def prepare(self, operand: Operand) -> Callable[[], None]:
        if any(self._choices(operand)):
            return super().prepare(operand)
        return self._rest.prepare(operand)

    def close(self) -> None:
        self._chosen.close()
        self._rest.close()

    def _choices(self, operand: Operand) -> list[bool]:
        return list(map(self._is_chosen, operand.targets, operand.wire_dtypes))


class LargeInPlace(Partitioned):
    """Sums large arrays where they are, by messages, and all others by another algorithm."""

    def __init__(
        self, messages: PairwiseAllreduce | CirculantAllreduce, small: Algorithm
    ) -> None:
        """Own the algorithm for small arrays."""
        super().__init__(
            lambda target, wire: (
                target.nbytes >= IN_PLACE_BYTES and wire == target.dtype
            ),
            Bucketed(messages.allreduce, per_tensor=True),
            small,
        )
        self._messages = messages

    def stream(self, next_operand: NextOperand) -> None:
        """Operands, all of one divisor, are one stream, in which there is always something."""
        first = next_operand(True)
        if first is None:
            return
        held = [first]

        def next_pair(wait: bool) -> Pair | None:
            while (operand := held.pop() if held else next_operand(wait)) is not None:
                flat = operand.flat
                if flat is not None:
                    np.concatenate(
                        [each.reshape(-1) for each in operand.sources], out=flat
                    )
                    return flat, flat
                if not wait:  # its messages must not mix with those under way
                    held.append(operand)
                    return None
                self.allreduce(operand)
            return None

        with overflow_errstate():
            self._messages.stream(next_pair, first.divisor)
