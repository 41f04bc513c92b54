"""What every algorithm for means of gradients does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..messaging import Context

Arrays: TypeAlias = Sequence[np.ndarray]
Dtypes: TypeAlias = Sequence[np.dtype]


class Bucket(NamedTuple):
    """Arrays whose means are taken together; as for :meth:`Algorithm.mean`."""

    sources: Arrays
    targets: Arrays
    wire_dtypes: Dtypes
    # The memory of all targets, one after the other, where all have one dtype and travel in it.
    flat: np.ndarray | None


# Returns the next bucket. None after the last one; also where the next one has not been handed in
# yet, unless it is to wait for it.
NextBucket: TypeAlias = Callable[[bool], Bucket | None]


class Algorithm(ABC):
    """Takes the mean of a list of arrays over ranks."""

    @abstractmethod
    def mean(self, sources: Arrays, targets: Arrays, wire_dtypes: Dtypes) -> None:
        """Write the mean over ranks of each source into its target (collective).

        What travels together follows from what is equal on all ranks (sizes, dtypes,
        ``wire_dtypes``), never from the memory order of an array on one rank. Beside sources and
        targets this takes a few chunks of memory, and a copy of each source that is not
        C-contiguous.

        Args:
            sources: arrays of any memory order; equal shapes and dtypes on all ranks.
            targets: C-contiguous arrays of the same shapes and dtypes; a target may be its source.
            wire_dtypes: the dtype in which each array travels.
        """

    def stage(self, sources: Arrays, targets: Arrays, wire_dtypes: Dtypes) -> Callable[[], None]:
        """Do the part of :meth:`mean` that needs no other rank, and writes to no target.

        The function that it returns does the rest (collective). It is to be called once all ranks
        have staged alike and have passed a barrier since, or not at all.
        """
        return partial(self.mean, sources, targets, wire_dtypes)

    def mean_each(self, next_bucket: NextBucket) -> None:
        """Take the means of buckets as they come, the same on all ranks (collective)."""
        while (bucket := next_bucket(True)) is not None:
            self.mean(bucket.sources, bucket.targets, bucket.wire_dtypes)

    def close(self) -> None:  # noqa: B027  (optional: an algorithm may own nothing)
        """Release what the algorithm owns (collective)."""

    def release_local(self) -> None:  # noqa: B027  (likewise)
        """Release what needs no other rank, and notify ranks that wait for it (not collective)."""


def mean_apart(
    first: Algorithm, chosen: Sequence[bool], rest: Algorithm, *arrays_and_dtypes: Sequence[Any]
) -> None:
    """Take the mean of the chosen arrays by one algorithm, then of the rest (collective)."""
    for algorithm, wanted in ((first, True), (rest, False)):
        which = [is_chosen == wanted for is_chosen in chosen]
        if any(which):
            algorithm.mean(*[list(compress(each, which)) for each in arrays_and_dtypes])


# Makes an algorithm for the ranks of a context (collective).
Factory: TypeAlias = Callable[[Context], Algorithm]


class NoOp(Algorithm):
    """Communicates nothing, to measure everything else."""

    def mean(self, sources: Arrays, targets: Arrays, wire_dtypes: Dtypes) -> None:
        for source, target in zip(sources, targets, strict=True):
            if target is not source:
                target[...] = source
