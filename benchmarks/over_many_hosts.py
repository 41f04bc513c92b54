"""Measures a mean over hosts of one rank each on this rank, and the constants of its cost."""

from __future__ import annotations

import time
from typing import Any

import chainer
import numpy as np
from limits import quartiles
from measure import measure
from mpi4py import MPI
from peers import RAW, Case

from chainermn_comm import create_communicator
from chainermn_comm.messaging import start_exchange
from chainermn_comm.runtime import barrier, wait_all
from chainermn_comm.sums.message_sum import message_sum
from chainermn_comm.sums.rounds import run

NAMES = ("flat", "hierarchical")
SMALL, PIECE, PIECES = 8, 1 << 20, 32  # bytes of messages; messages under way
MEMORY = 64 << 20  # bytes of an array that no cache holds
REPEAT = 200


def means(comm: MPI.Intracomm, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """Time the mean of one array, beside MPI's sum of the same (collective)."""
    gradient = np.empty(nbytes // 4, np.float32)
    expected = np.float32((comm.size + 1) / 2)
    model = chainer.Link()
    with model.init_scope():
        model.w = chainer.Parameter(np.zeros(1, np.float32))
    model.w.data = np.broadcast_to(np.float32(0), gradient.shape)
    model.w.grad = gradient

    def prepare() -> None:
        gradient.fill(comm.rank + 1)

    def is_right(factor: int) -> bool:
        return bool(
            comm.allreduce(bool(np.all(gradient == expected * factor)), MPI.LAND)
        )

    opened = [(name, create_communicator(name, comm)) for name in NAMES]
    cases = [
        Case(
            RAW,
            "mpi",
            prepare,
            lambda: comm.Allreduce(MPI.IN_PLACE, gradient),
            lambda: is_right(comm.size),
        )
    ]
    for name, communicator in opened:

        def mean(communicator: Any = communicator) -> None:
            communicator.allreduce_grad(model)

        cases.append(Case(name, "ours", prepare, mean, lambda: is_right(1)))
    rows = measure(cases, comm, rounds, realtime=False, warm_up=2)
    mpi = np.array(rows[0]["ms"])
    for row in rows:
        ms = np.array(row["ms"])
        row["median_ms"], row["over_mpi"] = float(np.median(ms)), quartiles(ms / mpi)
    for _, communicator in opened:
        communicator.finalize()
    return rows


def constants(comm: MPI.Intracomm, on_node: MPI.Intracomm) -> dict[str, float]:
    """Measure what `simulated.Constants` holds, on two hosts of some ranks (collective)."""
    leader = on_node.rank == 0
    leaders = MPI.Intracomm(comm.Split(0 if leader else MPI.UNDEFINED, comm.rank))
    found = {"barrier": _time(lambda: barrier(on_node), REPEAT)}
    comm.Barrier()
    if leader:
        peer = 1 - leaders.rank
        small = np.zeros(SMALL, np.uint8)

        def there_and_back() -> None:
            for first in (0, 1):
                if leaders.rank == first:
                    leaders.Send([small, MPI.BYTE], peer)
                else:
                    leaders.Recv([small, MPI.BYTE], peer)

        def swap(nbytes: int, messages: int) -> None:
            memory = np.zeros((2, messages, nbytes), np.uint8)
            requests = start_exchange(
                leaders,
                [(peer, row) for row in memory[0]],
                [(peer, row) for row in memory[1]],
                0,
            )
            wait_all(requests)

        found["message"] = message_seconds()
        half = _time(there_and_back, REPEAT) / 2
        found["latency"] = max(half - 2 * found["message"], 0)
        found["bandwidth"] = PIECE * PIECES / _time(lambda: swap(PIECE, PIECES), 5)
        first, second, out = np.ones((3, MEMORY // 4), np.float32)
        found["memory"] = (
            3 * MEMORY / min(_sum_seconds(first, second, out) for _ in range(9))
        )
    comm.Barrier()
    everywhere: dict[str, float] = comm.bcast(found)
    return everywhere


class Itself:
    """In place of a communicator of many ranks: what is sent comes back to this one."""

    rank, size = 0, 1024

    def __init__(self) -> None:
        self.messages = 0

    def Irecv(self, buffer: Any, _: int, tag: int) -> MPI.Request:
        return MPI.COMM_SELF.Irecv(buffer, 0, tag)

    def Isend(self, buffer: Any, _: int, tag: int) -> MPI.Request:
        self.messages += 1
        return MPI.COMM_SELF.Isend(buffer, 0, tag)


def message_seconds() -> float:
    """Return the processor's time for either end of a message, MPI's and the algorithm's.

    It is measured without a network, of messages of few bytes; the least of some times,
    since a core that others use, too, is slower.
    """
    comm: Any = Itself()
    summing, numbers = message_sum(comm, 0), np.zeros(comm.size, np.float32)
    found: list[float] = []
    for _ in range(REPEAT):
        start, comm.messages = time.thread_time(), 0
        run([summing(numbers, numbers, 1, np.add)], at_once=1)
        found.append((time.thread_time() - start) / comm.messages / 2)
    return min(found)


def _sum_seconds(first: np.ndarray, second: np.ndarray, out: np.ndarray) -> float:
    start = time.thread_time()
    np.add(first, second, out=out)
    return time.thread_time() - start


def _time(call: Any, repeat: int) -> float:
    """Return the median of the seconds that calls take."""
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))
