"""Chooses among algorithms that give the same bits the one that is fastest on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mpi4py import MPI

from ..arithmetic import Operand
from ..messaging import Algorithm

# Calls by which a candidate is measured: the first allocates, and of the others the fastest counts.
TRIALS = 3
MOST_SIZES = 1000  # that are known; gradients have few, users' arrays may have any


class Autotuner(Algorithm):
    """Takes few bytes by the first of the candidates, and more by the fastest.

    The first calls with a number of bytes use each candidate in turn; rank 0's clock then chooses
    one for all later calls with that number, so that these need no agreement.
    """

    def __init__(
        self, comm: MPI.Intracomm, candidates: Sequence[Algorithm], least_bytes: int
    ) -> None:
        """Own the algorithms; measure from ``least_bytes`` on."""
        self._comm, self._candidates, self._least_bytes = comm, candidates, least_bytes
        self._seconds: dict[int, list[float]] = {}  # by bytes: of each trial so far
        self._chosen: dict[int, Algorithm] = {}

    def allreduce(self, operand: Operand) -> None:
        nbytes = sum([target.nbytes for target in operand.targets])
        algorithm = self._chosen_for(nbytes)
        if algorithm is not None:
            algorithm.allreduce(operand)
            return
        if len(self._seconds) + len(self._chosen) >= MOST_SIZES:
            self._seconds, self._chosen = {}, {}
        seconds = self._seconds.setdefault(nbytes, [])
        start = time.perf_counter()
        self._candidates[len(seconds) // TRIALS].allreduce(operand)
        seconds.append(time.perf_counter() - start)
        if len(seconds) == TRIALS * len(self._candidates):
            del self._seconds[nbytes]
            firsts = range(0, len(seconds), TRIALS)
            least = [min(seconds[first + 1 : first + TRIALS]) for first in firsts]
            index = self._comm.bcast(least.index(min(least)))
            self._chosen[nbytes] = self._candidates[index]

    def prepare(self, operand: Operand) -> Callable[[], None]:
        algorithm = self._chosen_for(sum([target.nbytes for target in operand.targets]))
        # Those that are measured are so from their beginning.
        return super().prepare(operand) if algorithm is None else algorithm.prepare(operand)

    def close(self) -> None:
        for algorithm in self._candidates:
            algorithm.close()

    def _chosen_for(self, nbytes: int) -> Algorithm | None:
        return self._candidates[0] if nbytes < self._least_bytes else self._chosen.get(nbytes)
