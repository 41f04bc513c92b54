"""What every algorithm for sums over ranks does, and what is summed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from ..messaging import ProcessGroup

Arrays: TypeAlias = Sequence[np.ndarray]
Dtypes: TypeAlias = Sequence[np.dtype]


class Operand(NamedTuple):
    """Arrays that are summed together; equal shapes and dtypes on all ranks.

    What travels together follows from what is equal on all ranks (sizes, dtypes, ``wire_dtypes``),
    never from the memory order of an array on one rank.
    """

    sources: Arrays  # of any memory order
    targets: Arrays  # C-contiguous, of the same shapes and dtypes; a target may be its source
    wire_dtypes: Dtypes  # in which each array travels
    divisor: int = 1  # of the result; other than 1 for sums of floats only
    op: np.ufunc = np.add  # or maximum or minimum, of arrays that travel in their own dtype
    # The memory of all targets, one after the other, where all have one dtype and travel in it.
    flat: np.ndarray | None = None

    def only(self, indices: Sequence[int]) -> Operand:
        """Return some of the arrays; the operand itself if they are all."""
        if len(indices) == len(self.targets):
            return self
        return Operand(
            [self.sources[index] for index in indices],
            [self.targets[index] for index in indices],
            [self.wire_dtypes[index] for index in indices],
            self.divisor,
            self.op,
        )

    def flattened(self) -> Operand:
        """Return the operand with 1-D arrays: targets' memory, and copies of sources if need be."""
        targets = [target if target.ndim == 1 else target.reshape(-1) for target in self.targets]
        sources = targets
        if self.sources is not self.targets:
            sources = [
                flat if target is source else source.reshape(-1)
                for source, target, flat in zip(self.sources, self.targets, targets, strict=True)
            ]
        return Operand(sources, targets, self.wire_dtypes, self.divisor, self.op)


# Returns the next operand. None after the last one; also where the next one has not been handed in
# yet, unless it is to wait for it.
NextOperand: TypeAlias = Callable[[bool], Operand | None]


class Algorithm(ABC):
    """Sums arrays over ranks."""

    @abstractmethod
    def allreduce(self, operand: Operand) -> None:
        """Write the sum over ranks of each source, divided, into its target (collective).

        Beside sources and targets this takes a few chunks of memory, and a copy of each source that
        is not C-contiguous.
        """

    def prepare(self, operand: Operand) -> Callable[[], None]:
        """Do the part of :meth:`allreduce` that needs no other rank, and writes to no target.

        The function that it returns does the rest (collective). It is to be called once all ranks
        have prepared alike and have passed a barrier since, or not at all.
        """
        return partial(self.allreduce, operand)

    def stream(self, next_operand: NextOperand) -> None:
        """Sum operands as they come, the same on all ranks (collective)."""
        while (operand := next_operand(True)) is not None:
            self.allreduce(operand)

    def close(self) -> None:  # noqa: B027  (optional: an algorithm may own nothing)
        """Release what the algorithm owns (collective)."""

    def release_local(self) -> None:  # noqa: B027  (likewise)
        """Release what needs no other rank (not collective)."""


# Makes an algorithm for the ranks of a group (collective).
Factory: TypeAlias = Callable[[ProcessGroup], Algorithm]


class NoOp(Algorithm):
    """Communicates nothing, to measure everything else."""

    def allreduce(self, operand: Operand) -> None:
        for source, target in zip(operand.sources, operand.targets, strict=True):
            if target is not source:
                target[...] = source
