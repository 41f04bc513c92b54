"""Few ranks, or one, that sum as many do."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from unittest import mock

import numpy as np

from chainermn_comm import Topology
from chainermn_comm.config import Settings
from chainermn_comm.sums import Operand, factories, message_sum, pairwise


def by_circulant() -> AbstractContextManager[object]:
    """Meanwhile, new communicators of any number of ranks and nodes take sums by circulant."""
    return mock.patch.object(message_sum, "PAIRWISE_RANKS", 1)


def no_sums_by_messages() -> AbstractContextManager[object]:
    """Meanwhile, a sum that goes from rank to rank by messages fails."""
    return mock.patch.object(pairwise, "start_exchange", side_effect=AssertionError)


def group_of(comm, **settings):
    """What a sum by messages asks of the group of a communicator's ranks, each on a node."""
    return SimpleNamespace(
        comm=comm,
        rank=comm.rank,
        size=comm.size,
        tag=0,
        topology=Topology.of(range(comm.size)),
        settings=Settings(**settings),
    )


def most_bytes_of_a_sum(size: int, array: np.ndarray, **settings) -> int:
    """The memory that one of so many ranks takes for a mean by messages, which never come."""
    algorithm = factories.packed(group_of(rank_1_of(size), **settings))
    operand = Operand([array], [array], [array.dtype], 3)
    return most_bytes(lambda: algorithm.allreduce(operand))


def mean_by_messages(comm, arrays: list[np.ndarray], divisor: int, chunk_bytes: int):
    """Overwrite arrays by their sums over ranks, divided (collective)."""
    algorithm = factories.packed(group_of(comm, chunk_bytes=chunk_bytes))
    dtypes = [array.dtype for array in arrays]
    algorithm.allreduce(Operand(arrays, arrays, dtypes, divisor))


def is_chosen_for(size: int) -> bool:
    """Whether so many ranks sum so by themselves."""
    return not message_sum.is_pairwise(size)


def rank_1_of(size: int):
    """What stands in for a communicator of so many ranks."""
    comm = SimpleNamespace(rank=1, size=size, Dup=lambda: comm)
    return comm


def most_bytes(call: Callable[[], object]) -> int:
    """The most that NumPy held during a call, beside what it held before."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak - before
