"""Large arrays go from rank to rank where they are, without being packed; the others don't."""

from __future__ import annotations

import numpy as np

from ..arithmetic import overflow_errstate
from .algorithm import Algorithm, NextOperand, Operand, allreduce_apart
from .bucketed import Bucketed
from .circulant import CirculantAllreduce
from .pairwise import Pair, PairwiseAllreduce

# Arrays of this size and more, if they travel in their own dtype.
IN_PLACE_BYTES = 1 << 20


class LargeInPlace(Algorithm):
    """Takes the means of large arrays in place, and of all others by another algorithm."""

    def __init__(
        self, through_mpi: PairwiseAllreduce | CirculantAllreduce, small: Algorithm
    ) -> None:
        """Own the algorithm for small arrays."""
        self._through_mpi, self._small = through_mpi, small
        self._large = Bucketed(through_mpi.allreduce, per_tensor=True)

    def allreduce(self, operand: Operand) -> None:
        large = [
            target.nbytes >= IN_PLACE_BYTES and wire == target.dtype
            for target, wire in zip(operand.targets, operand.wire_dtypes, strict=True)
        ]
        allreduce_apart(self._large, large, self._small, operand)

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
                    np.concatenate([each.reshape(-1) for each in operand.sources], out=flat)
                    return flat, flat
                if not wait:  # its messages must not mix with those under way
                    held.append(operand)
                    return None
                self.allreduce(operand)
            return None

        with overflow_errstate():
            self._through_mpi.stream(next_pair, first.divisor)

    def close(self) -> None:
        self._through_mpi.close()
        self._small.close()
