"""Few ranks that sum as many do; and whether the means of each communicator are then right.

As a program, run under mpiexec, it takes means on all ranks as they are; rank 0 prints
what is wrong, and how many means were taken.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import numpy as np
from mpi4py import MPI

from chainermn_comm import Topology
from chainermn_comm.config import Settings
from chainermn_comm.sums import Operand, factories, message_sum, pairwise
from tests.support.worlds.many_ranks import ALGORITHMS, CALLS, report, wrong_means
from tests.support.worlds.one_of_many import most_bytes, rank_1_of
from tests.support.worlds.topologies import on_nodes

WORLD = MPI.COMM_WORLD


def by_circulant() -> AbstractContextManager[object]:
    """Meanwhile, new communicators of any number of ranks and nodes take sums by circulant."""
    return mock.patch.object(message_sum, "PAIRWISE_RANKS", 1)


def no_sums_by_messages() -> AbstractContextManager[object]:
    """Meanwhile, a sum that goes from rank to rank by messages fails."""
    return mock.patch.object(pairwise, "start_exchange", side_effect=AssertionError)


def group_of(comm: Any, **settings: Any) -> Any:
    """What a sum by messages asks of the group of a communicator's ranks, each on a node."""
    return SimpleNamespace(
        comm=comm,
        rank=comm.rank,
        size=comm.size,
        tag=0,
        topology=Topology.of(range(comm.size)),
        settings=Settings(**settings),
    )


def most_bytes_of_a_sum(size: int, array: np.ndarray, **settings: Any) -> int:
    """The memory that one of so many ranks takes for a mean by messages, which never come."""
    algorithm = factories.packed(group_of(rank_1_of(size), **settings))
    operand = Operand([array], [array], [array.dtype], 3)
    return most_bytes(lambda: algorithm.allreduce(operand))


def mean_by_messages(
    comm: Any, arrays: list[np.ndarray], divisor: int, chunk_bytes: int
) -> None:
    """Overwrite arrays by their sums over ranks, divided (collective)."""
    algorithm = factories.packed(group_of(comm, chunk_bytes=chunk_bytes))
    dtypes = [array.dtype for array in arrays]
    algorithm.allreduce(Operand(arrays, arrays, dtypes, divisor))


def is_chosen_for(size: int) -> bool:
    """Whether so many ranks sum so by themselves."""
    return not message_sum.is_pairwise(size)


def main() -> NoReturn:
    wrong, means = [], 0
    for name in ALGORITHMS:
        for larger in (0, 300_000):
            with on_nodes(range(WORLD.size), name) as comm:
                wrong += [
                    f"rank {WORLD.rank}: {one}"
                    for one in wrong_means(comm, None, larger)
                ]
            means += CALLS + 1
    report(wrong, means)


if __name__ == "__main__":
    with nullcontext() if WORLD.size > message_sum.PAIRWISE_RANKS else by_circulant():
        main()
