"""Sums over ranks by messages: pairwise if they are few, on a circulant graph if they are many."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from .circulant import circulant_rounds, rounds_of
from .pairwise import pairwise_rounds
from .rounds import ReceiveMemory, Rounds

# Most ranks that exchange pairwise, which keeps the order of ranks and takes two
# rounds.
PAIRWISE_RANKS = 16


def is_pairwise(size: int, in_rank_order: bool = False) -> bool:
    """Return whether sums over ``size`` ranks are taken in the order of ranks."""
    return in_rank_order or size <= PAIRWISE_RANKS


def num_rounds(size: int) -> int:
    """Return the most rounds of a sum over ``size`` ranks."""
    if is_pairwise(size):
        return 2
    return 2 * len(rounds_of(size))


class MessageSum:
    """Sums over the ranks of a communicator: the same bits on every rank."""

    def __init__(
        self, comm: MPI.Intracomm, tag: int, in_rank_order: bool = False
    ) -> None:
        """Use ``comm``, which stays the caller's; no other messages have ``tag``.

        Not collective. Sums over up to 16 ranks are in their order, and those over more
        ranks if ``in_rank_order``.
        """
        self._comm = comm
        self._tag = tag
        self._memory = ReceiveMemory()
        self._take = circulant_rounds
        if is_pairwise(comm.size, in_rank_order):
            self._take = pairwise_rounds

    def rounds(
        self,
        source: np.ndarray,
        target: np.ndarray,
        divisor: int = 1,
        op: np.ufunc = np.add,
    ) -> Rounds:
        """Return the rounds that write the sum of ``source`` over ranks to ``target`` (collective).

        ``op`` may also be the maximum or the minimum. Arrays are 1-D, contiguous, of one
        length and dtype, on all ranks; ``target`` may be ``source``. The result is
        divided before it is rounded to that dtype.
        """
        return self._take(
            self._comm, self._tag, self._memory, source, target, divisor, op
        )
