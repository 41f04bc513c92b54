"""Chooses among algorithms that give the same bits the one that was fastest lately."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from mpi4py import MPI

from .algorithm import Algorithm, Arrays, Dtypes

# How often another candidate than the fastest is tried: which one is fastest can change within
# seconds; see docs/decisions/autotuner.md.
TRIAL_INTERVAL = 32
# So many uses of a candidate are remembered, of which the fastest counts.
REMEMBERED_USES = 3


class Autotuner(Algorithm):
    """Small arrays go by the default algorithm, large ones by the fastest candidate.

    The candidates are measured as they are used; rank 0's clock decides for all.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        default: Algorithm,
        candidates: Sequence[Algorithm],
        large_bytes: int,
    ) -> None:
        """Own the algorithms; ``candidates`` may include the default.

        An array is large from ``large_bytes`` on, if it travels in its own dtype.
        """
        self._comm, self._large_bytes = comm, large_bytes
        self._default, self._candidates = default, list(candidates)
        # Of each candidate's last uses: one that something else slowed down doesn't rule it out
        # until its next trial. Zero makes a candidate the next choice; its first use, which
        # allocates, isn't counted.
        self._seconds_per_byte = [(0.0,) * REMEMBERED_USES for _ in self._candidates]
        self._used = [False] * len(self._candidates)
        self._calls = 0
        self._choice = bytearray(1)

    def mean(self, sources: Arrays, targets: Arrays, wire_dtypes: Dtypes) -> None:
        large = self._which_are_large(targets, wire_dtypes)
        if not any(large):
            self._default.mean(sources, targets, wire_dtypes)
            return
        for mean, which in ((self._mean_large, True), (self._default.mean, False)):
            chosen = [is_large == which for is_large in large]
            if any(chosen):
                every: list[Any] = [sources, targets, wire_dtypes]
                mean(*[list(compress(each, chosen)) for each in every])

    def stage(self, sources: Arrays, targets: Arrays, wire_dtypes: Dtypes) -> Callable[[], None]:
        if any(self._which_are_large(targets, wire_dtypes)):
            return super().stage(sources, targets, wire_dtypes)
        return self._default.stage(sources, targets, wire_dtypes)

    def close(self) -> None:
        for algorithm in dict.fromkeys([self._default, *self._candidates]):
            algorithm.close()

    def _which_are_large(self, targets: Arrays, wire_dtypes: Dtypes) -> list[bool]:
        least = self._large_bytes
        return [
            target.nbytes >= least and wire == target.dtype
            for target, wire in zip(targets, wire_dtypes, strict=True)
        ]

    def _mean_large(self, sources: Arrays, targets: Arrays, wire_dtypes: Dtypes) -> None:
        if len(self._candidates) == 1:
            self._candidates[0].mean(sources, targets, wire_dtypes)
            return
        self._choice[0] = self._next_candidate()
        self._comm.Bcast([self._choice, MPI.BYTE])
        chosen = self._choice[0]
        start = time.perf_counter()
        self._candidates[chosen].mean(sources, targets, wire_dtypes)
        if self._used[chosen]:
            nbytes = sum(target.nbytes for target in targets)
            last = (time.perf_counter() - start) / max(nbytes, 1)
            self._seconds_per_byte[chosen] = (*self._seconds_per_byte[chosen][1:], last)
        self._used[chosen] = True

    def _next_candidate(self) -> int:
        self._calls += 1
        least = list(map(min, self._seconds_per_byte))
        fastest, *others = sorted(range(len(least)), key=least.__getitem__)
        if self._calls % TRIAL_INTERVAL == 0:
            return sorted(others)[self._calls // TRIAL_INTERVAL % len(others)]
        return fastest
