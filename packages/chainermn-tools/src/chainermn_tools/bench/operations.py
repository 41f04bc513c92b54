"""The operations that are measured: their calls, checks of results, and bandwidth factors.

Sizes and factors are those of nccl-tests, see docs/bench.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase
from chainermn_tools.bench.values import fill_pattern, matches_pattern

FLOAT_BYTES = 4
TAG = 0
# Arrays as long as `bytes` that a rank holds at most: its own, one for the baselines' results,
# what an operation returns, and a copy that MPI or an operation makes.
ARRAYS = 4


@dataclass(frozen=True)
class Invocation:
    """One operation on arrays of one size."""

    prepare: Callable[[], None]  # writes the values that the next call sends
    call: Callable[[], Any]  # what is timed; returns the result
    is_correct: Callable[[Any], bool]  # whether a result is what it must be


@dataclass(frozen=True)
class Operation:
    """A kind of call."""

    title: str  # for people
    bus_factor: Callable[[int], float]  # bus bandwidth over algorithm bandwidth, by ranks
    # Takes a communicator, the array to send, and an array of the same size for results; both
    # float32.
    make_invocation: Callable[[CommunicatorBase, np.ndarray, np.ndarray], Invocation]
    transfers_per_call: int = 1  # transfers that follow one another in a call
    min_ranks: int = 1  # the operation is skipped in jobs of fewer ranks


class Model:
    """As little of a model as a communicator needs: itself is its one parameter."""

    def __init__(self, grad: Any) -> None:
        self.data = self.grad = grad

    def namedparams(self) -> Iterator[tuple[str, Model]]:
        yield "/w", self


def _mean_grad(comm: CommunicatorBase, sent: np.ndarray, result: np.ndarray) -> Invocation:
    model = Model(sent)

    def call() -> Any:
        comm.multi_node_mean_grad(model)
        return model.grad

    return Invocation(
        lambda: fill_pattern(sent, comm.rank),
        call,
        lambda mean: matches_pattern(mean, sent.size, plus=(comm.size - 1) / 2),
    )


def _is_sum(comm: CommunicatorBase, total: Any, size: int) -> bool:
    return matches_pattern(total, size, times=comm.size, plus=comm.size * (comm.size - 1) / 2)


def _allreduce(comm: CommunicatorBase, sent: np.ndarray, result: np.ndarray) -> Invocation:
    return Invocation(
        lambda: fill_pattern(sent, comm.rank),
        lambda: comm.allreduce(sent),
        lambda total: _is_sum(comm, total, sent.size),
    )


def _bcast(comm: CommunicatorBase, sent: np.ndarray, result: np.ndarray) -> Invocation:
    mine = sent if comm.rank == 0 else None
    return Invocation(
        lambda: fill_pattern(sent, comm.rank),
        lambda: comm.bcast(mine),
        lambda got: matches_pattern(got, sent.size),
    )


def _allgather(comm: CommunicatorBase, sent: np.ndarray, result: np.ndarray) -> Invocation:
    mine = sent[: sent.size // comm.size]
    return Invocation(
        lambda: fill_pattern(mine, comm.rank),
        lambda: comm.allgather(mine),
        lambda got: (
            len(got) == comm.size
            and all(matches_pattern(one, mine.size, plus=rank) for rank, one in enumerate(got))
        ),
    )


def _send(comm: CommunicatorBase, sent: np.ndarray, result: np.ndarray) -> Invocation:
    """From rank 0 to the last one and back."""
    last = comm.size - 1

    def call() -> Any:
        if comm.rank == 0:
            comm.send(sent, last, TAG)
            return comm.recv(last, TAG)
        if comm.rank == last:
            got = comm.recv(0, TAG)
            comm.send(got, 0, TAG)
            return got
        return None

    return Invocation(
        lambda: fill_pattern(sent, comm.rank),
        call,
        lambda got: comm.rank not in (0, last) or matches_pattern(got, sent.size),
    )


def _copy(comm: CommunicatorBase, sent: np.ndarray, result: np.ndarray) -> Invocation:
    """All ranks at once copy from their own memory to their own memory."""

    def call() -> Any:
        np.copyto(result, sent)
        return result

    return Invocation(
        lambda: fill_pattern(sent, comm.rank),
        call,
        lambda copy: matches_pattern(copy, sent.size, plus=comm.rank),
    )


def _mpi_allreduce(comm: CommunicatorBase, sent: np.ndarray, result: np.ndarray) -> Invocation:
    def call() -> Any:
        comm.mpi_comm.Allreduce(sent, result)
        return result

    return Invocation(
        lambda: fill_pattern(sent, comm.rank), call, lambda total: _is_sum(comm, total, sent.size)
    )


def _all_to_all_but_own(ranks: int) -> float:
    return (ranks - 1) / ranks


def _there_and_back(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _as_it_is(ranks: int) -> float:
    return 1.0


MEAN_GRAD = "mean_grad"
OPERATIONS = {
    MEAN_GRAD: Operation("mean of gradients", _there_and_back, _mean_grad),
    "allreduce": Operation("allreduce", _there_and_back, _allreduce),
    "bcast": Operation("bcast", _as_it_is, _bcast),
    "allgather": Operation("allgather", _all_to_all_but_own, _allgather),
    "send": Operation("send", _as_it_is, _send, transfers_per_call=2, min_ranks=2),
}
# What the machine and its MPI do without us.
BASELINES = {
    "memcpy": Operation("copy in own memory", _as_it_is, _copy),
    "MPI_Allreduce": Operation("plain MPI_Allreduce", _there_and_back, _mpi_allreduce),
}
