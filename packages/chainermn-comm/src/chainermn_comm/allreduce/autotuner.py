"""Chooses among algorithms that give the same bits the one that is fastest on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mpi4py import MPI

from ..arithmetic import Operand
from ..messaging import Algorithm

# Calls by which a candidate is measured: the first allocates, and of the others the
# fastest counts.
TRIALS = 3


class Autotuner(Algorithm):
    """Takes few bytes by the first of the candidates, and more by the fastest.

    The first calls of a size, between two powers of two, use each candidate in turn;
    rank 0's clock then chooses one for all later calls of that size, so that these need
    no agreement.
    """

    def __init__(
        self, comm: MPI.Intracomm, candidates: Sequence[Algorithm], least_bytes: int
    ) -> None:
        """Own the algorithms; measure from ``least_bytes`` on."""
        self._comm, self._candidates, self._least_bytes = comm, candidates, least_bytes
        # By size: per byte, of each trial so far.
        self._seconds: dict[int, list[float]] = {}
        self._chosen: dict[int, Algorithm] = {}

    def allreduce(self, operand: Operand) -> None:
        nbytes = sum([target.nbytes for target in operand.targets])
        algorithm = self._chosen_for(nbytes)
        if algorithm is not None:
            algorithm.allreduce(operand)
            return
        seconds = self._seconds.setdefault(size := nbytes.bit_length(), [])
        start = time.perf_counter()
        self._candidates[len(seconds) // TRIALS].allreduce(operand)
        seconds.append((time.perf_counter() - start) / nbytes)
        if len(seconds) == TRIALS * len(self._candidates):
            del self._seconds[size]
            least = [
                min(seconds[i + 1 : i + TRIALS]) for i in range(0, len(seconds), TRIALS)
            ]
            self._chosen[size] = self._candidates[
                self._comm.bcast(least.index(min(least)))
            ]

    def prepare(self, operand: Operand) -> Callable[[], None]:
        algorithm = self._chosen_for(sum([target.nbytes for target in operand.targets]))
        # Those that are measured are so from their beginning.
        return (
            super().prepare(operand)
            if algorithm is None
            else algorithm.prepare(operand)
        )

    def close(self) -> None:
        for algorithm in self._candidates:
            algorithm.close()

    def _chosen_for(self, nbytes: int) -> Algorithm | None:
        few = nbytes < self._least_bytes
        return self._candidates[0] if few else self._chosen.get(nbytes.bit_length())
