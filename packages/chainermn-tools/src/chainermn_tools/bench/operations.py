"""The operations that are measured: their calls, and the checks of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase
from chainermn_tools.bench.values import fill_pattern, matches_pattern

TAG = 0


@dataclass(frozen=True)
class Invocation:
    """One operation on arrays of one size."""

    prepare: Callable[[], None]  # writes the values that the next call sends
    call: Callable[[], Any]  # the call that is timed; returns the result
    is_correct: Callable[[Any], bool]  # whether a result is right


@dataclass(frozen=True)
class Operation:
    """A kind of call."""

    title: str  # for people
    # Takes a communicator, the array to send, and an array of the same size for
    # results; both float32.
    make_invocation: Callable[[CommunicatorBase, np.ndarray, np.ndarray], Invocation]
    min_ranks: int = 1  # in jobs of fewer ranks the operation is skipped


class Model:
    """The least that a communicator needs of a model; the object is its own only parameter."""

    def __init__(self, grad: Any) -> None:
        self.data = self.grad = grad

    def namedparams(self) -> Iterator[tuple[str, Model]]:
        yield "/w", self


def _invocation(
    comm: CommunicatorBase, sent: np.ndarray, call: Callable[[], Any], **expected: float
) -> Invocation:
    """Return a call that sends the pattern; its result must be as `matches_pattern` expects."""
    prepare = partial(fill_pattern, sent, comm.rank)
    return Invocation(
        prepare, call, partial(matches_pattern, size=sent.size, **expected)
    )


def _sum(ranks: int) -> dict[str, float]:
    return {"times": ranks, "plus": ranks * (ranks - 1) / 2}


def _mean_grad(
    comm: CommunicatorBase, sent: np.ndarray, result: np.ndarray
) -> Invocation:
    model = Model(sent)

    def call() -> Any:
        comm.multi_node_mean_grad(model)
        return model.grad

    return _invocation(comm, sent, call, plus=(comm.size - 1) / 2)


def _allreduce(
    comm: CommunicatorBase, sent: np.ndarray, result: np.ndarray
) -> Invocation:
    return _invocation(comm, sent, lambda: comm.allreduce(sent), **_sum(comm.size))


def _bcast(comm: CommunicatorBase, sent: np.ndarray, result: np.ndarray) -> Invocation:
    mine = None
    if comm.rank == 0:
        mine = sent
    return _invocation(comm, sent, lambda: comm.bcast(mine))


def _allgather(
    comm: CommunicatorBase, sent: np.ndarray, result: np.ndarray
) -> Invocation:
    mine = sent[: sent.size // comm.size]

    def is_correct(got: Any) -> bool:
        own = (
            matches_pattern(one, mine.size, plus=rank) for rank, one in enumerate(got)
        )
        return len(got) == comm.size and all(own)

    prepare = partial(fill_pattern, mine, comm.rank)
    return Invocation(prepare, lambda: comm.allgather(mine), is_correct)


def _send(comm: CommunicatorBase, sent: np.ndarray, result: np.ndarray) -> Invocation:
    """From rank 0 to the last rank and back."""
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

    def is_correct(got: Any) -> bool:
        return comm.rank not in (0, last) or matches_pattern(got, sent.size)

    return Invocation(partial(fill_pattern, sent, comm.rank), call, is_correct)


def _copy(comm: CommunicatorBase, sent: np.ndarray, result: np.ndarray) -> Invocation:
    """All ranks at once copy from their own memory to their own memory."""

    def call() -> Any:
        np.copyto(result, sent)
        return result

    return _invocation(comm, sent, call, plus=comm.rank)


def _mpi_allreduce(
    comm: CommunicatorBase, sent: np.ndarray, result: np.ndarray
) -> Invocation:
    def call() -> Any:
        comm.mpi_comm.Allreduce(sent, result)
        return result

    return _invocation(comm, sent, call, **_sum(comm.size))


MEAN_GRAD = "mean_grad"
OPERATIONS = {
    MEAN_GRAD: Operation("mean of gradients", _mean_grad),
    "allreduce": Operation("allreduce", _allreduce),
    "bcast": Operation("bcast", _bcast),
    "allgather": Operation("allgather", _allgather),
    "send": Operation("send there and back", _send, min_ranks=2),
}
# References: what the machine and its MPI do without us.
BASELINES = {
    "memcpy": Operation("copy in own memory", _copy),
    "mpi_allreduce": Operation("plain MPI_Allreduce", _mpi_allreduce),
}
