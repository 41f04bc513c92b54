"""The arrays that are summed over ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

Arrays: TypeAlias = Sequence[np.ndarray]
Dtypes: TypeAlias = Sequence[np.dtype]


class Operand(NamedTuple):
    """Arrays that are summed together; their shapes and dtypes are equal on all ranks.

    The division into messages follows from facts that are equal on all ranks (sizes,
    dtypes, ``wire_dtypes``), never from the memory order of an array on one rank.
    """

    sources: Arrays  # in any memory order
    # C-contiguous, of the same shapes and dtypes; a target may be its source.
    targets: Arrays
    wire_dtypes: Dtypes  # the dtype in which each array travels
    # The result is divided by it; only for sums of floats other than 1.
    divisor: int = 1
    # np.add, or np.maximum or np.minimum of arrays that travel in their own dtype.
    op: np.ufunc = np.add
    # While an array travels, it is divided by 2 to the power of its exponent. None if
    # no array is.
    exponents: Sequence[int] | None = None

    def flattened(self) -> Operand:
        """Return the operand with 1-D arrays: views of targets, and views or copies of sources."""
        targets = [target.ravel() for target in self.targets]  # faster than reshape
        sources = targets
        if self.sources is not self.targets:
            sources = targets.copy()
            for index, source in enumerate(self.sources):
                if source is not self.targets[index]:
                    sources[index] = source.ravel()
        return Operand(sources, targets, *self[2:])

    def keeps_dtypes(self) -> bool:
        """Return whether all arrays travel in their own dtypes."""
        return [target.dtype for target in self.targets] == list(self.wire_dtypes)

    def exponent(self, index: int) -> int:
        """Return the exponent of an array."""
        if self.exponents is None:
            return 0
        return self.exponents[index]
