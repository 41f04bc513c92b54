"""Of several ways that give the same bits, takes the one that was fastest lately."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from .reducer import Reducer

# How often another way than the fastest is tried. Two cores of one machine were seen to change
# within seconds between ways of which now the one, now the other was three times as fast.
TRIAL_INTERVAL = 32
# So many uses of a way are remembered, of which the fastest counts: with two of them, the slower
# way was taken for whole runs of the benchmark on a busy machine.
MEMORY = 3


class Fastest(Reducer):
    """Measures its ways as they are used; rank 0's clock decides for all."""

    def __init__(self, comm: MPI.Intracomm, ways: Sequence[Reducer]) -> None:
        """Own the ways, which all give the same bits; ``comm`` stays the caller's."""
        self._comm = comm
        self._ways = list(ways)
        # Of each way's last uses: one that something else held up doesn't rule a way out until its
        # next trial. Zero makes a way the next choice; its first use, which allocates, leaves it.
        self._seconds_per_byte = [(0.0,) * MEMORY for _ in self._ways]
        self._used = [False] * len(self._ways)
        self._calls = 0
        self._choice = bytearray(1)

    def mean(
        self,
        sources: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        wires: Sequence[np.dtype],
    ) -> None:
        self._choice[0] = self._next()
        self._comm.Bcast([self._choice, MPI.BYTE])
        way = self._choice[0]
        start = time.perf_counter()
        self._ways[way].mean(sources, targets, wires)
        if self._used[way]:
            nbytes = sum(target.nbytes for target in targets)
            last = (time.perf_counter() - start) / max(nbytes, 1)
            self._seconds_per_byte[way] = (*self._seconds_per_byte[way][1:], last)
        self._used[way] = True

    def _next(self) -> int:
        self._calls += 1
        fastest, *others = sorted(
            range(len(self._ways)), key=lambda way: min(self._seconds_per_byte[way])
        )
        if self._calls % TRIAL_INTERVAL == 0 and others:
            return sorted(others)[self._calls // TRIAL_INTERVAL % len(others)]
        return fastest

    def close(self) -> None:
        for way in self._ways:
            way.close()
