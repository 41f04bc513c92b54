"""Sums over ranks by messages: pairwise if they are few, on a circulant graph if they are many."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
from mpi4py import MPI

from .circulant import circulant_rounds, rounds_of
from .pairwise import pairwise_rounds
from .rounds import ReceiveMemory, Rounds

# The largest number of ranks that exchange pairwise, which keeps the order of ranks and
# takes two rounds.
PAIRWISE_RANKS = 16

# Returns the rounds that write the sum of a source over ranks to a target (collective),
# with the same bits on every rank. Both are 1-D and contiguous, with one length and dtype
# on all ranks; they may be one array. The result is divided by an int before it is rounded
# to the dtype. The operation is np.add, np.maximum or np.minimum.
Sum: TypeAlias = Callable[[np.ndarray, np.ndarray, int, np.ufunc], Rounds]


def is_pairwise(size: int, in_rank_order: bool = False) -> bool:
    """Return whether sums over ``size`` ranks are taken in the order of ranks."""
    return in_rank_order or size <= PAIRWISE_RANKS


def num_rounds(size: int) -> int:
    """Return the most rounds of a sum over ``size`` ranks."""
    if is_pairwise(size):
        return 2
    return 2 * len(rounds_of(size))


def message_sum(comm: MPI.Intracomm, tag: int, in_rank_order: bool = False) -> Sum:
    """Return the function that sums over the ranks of ``comm``, which stays the caller's.

    No other messages have ``tag``. Not collective. Sums over up to 16 ranks are in rank
    order; with ``in_rank_order``, sums over more ranks, too.
    """
    rounds = circulant_rounds
    if is_pairwise(comm.size, in_rank_order):
        rounds = pairwise_rounds
    return partial(rounds, comm, tag, ReceiveMemory())
