"""What is summed over ranks together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

Arrays: TypeAlias = Sequence[np.ndarray]
Dtypes: TypeAlias = Sequence[np.dtype]


class Operand(NamedTuple):
    """Arrays that are summed together; equal shapes and dtypes on all ranks.

    What travels together follows from what is equal on all ranks (sizes, dtypes,
    ``wire_dtypes``), never from the memory order of an array on one rank.
    """

    sources: Arrays  # of any memory order
    # C-contiguous, of the same shapes and dtypes; a target may be its source.
    targets: Arrays
    wire_dtypes: Dtypes  # in which each array travels
    divisor: int = 1  # of the result; other than 1 for sums of floats only
    # Or maximum or minimum, of arrays that travel in their own dtype.
    op: np.ufunc = np.add
    # The memory of all targets, one after the other, where all have one dtype and
    # travel in it.
    flat: np.ndarray | None = None

    def only(self, indices: Sequence[int]) -> Operand:
        """Return some of the arrays; the operand itself if they are all."""
        if len(indices) == len(self.targets):
            return self
        chosen = ([each[index] for index in indices] for each in self[:3])
        return Operand._make([*chosen, self.divisor, self.op, None])

    def flattened(self) -> Operand:
        """Return the operand with 1-D arrays: targets' memory, and copies of sources if need be."""
        targets = [
            target if target.ndim == 1 else target.reshape(-1)
            for target in self.targets
        ]
        sources = targets
        if self.sources is not self.targets:
            sources = [
                flat if target is source else source.reshape(-1)
                for source, target, flat in zip(
                    self.sources, self.targets, targets, strict=True
                )
            ]
        return Operand(sources, targets, self.wire_dtypes, self.divisor, self.op)


# Returns the next operand. None after the last one; also where the next one has not
# been handed in yet, unless it is to wait for it.
NextOperand: TypeAlias = Callable[[bool], Operand | None]
