"""The sum over ranks by messages: ranks exchange shards, each sums its own, and all get the sums.

Up to 16 ranks (:mod:`circulant` has more), every algorithm sums this way where it
doesn't go through shared memory; between nodes, :mod:`two_level` uses the two
exchanges, and sums itself. MPI's own reduction promises neither the order of a sum nor
16-bit types. As many bytes are moved as by a ring allreduce (Patarasuk and Yuan, 2009).
See docs/decisions/sums.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from ..layout import shard_slice
from ..messaging import Buffer, ProcessGroup, start_exchange
from ..numbers import BLOCK_ELEMENTS, overflow_errstate, sum_rows
from ..runtime import wait_all

# A source and its target, which may be the same: 1-D, contiguous, of one length and
# dtype.
Pair: TypeAlias = tuple[np.ndarray, np.ndarray]
# A function that writes sums over ranks, divided by a number, or maxima or minima.
Allreduce: TypeAlias = Callable[[Sequence[Pair], int, np.ufunc], None]

# Where a rank receives no more than this, every rank gathers whole buffers and sums
# them all: one exchange, where shards take two.
GATHER_BYTES = 256 << 10
# The more ranks, the shorter their shards, so that what a rank receives stays the same.
# But none is shorter than this: from some hundred ranks on a rank receives more.
LEAST_SHARD_BYTES = 8 << 10
# Layouts of gathered rows that are kept; models have few different sizes of small
# parameters.
CACHED_LAYOUTS = 256


@dataclass(frozen=True)
class Schedule:
    """How large the rounds of a sum are, and how many are in flight.

    In a round each rank sums one shard. Delays count the rounds from sending a round's
    shards.
    """

    chunk_bytes: int  # a shard's size at most
    # The most that a rank receives from all others in a round, in chunks.
    received_chunks: int
    sum_delay: int = 0  # until they are summed
    gather_delay: int = 0  # until the sums are sent
    wait_delay: int = 0  # until the sums of the others are waited for


# One round after the other. A shard, what is received for it and its sum stay in a
# core's cache.
BLOCKING = Schedule(2 << 20, 3)
# For ranks that share no memory. MPI progresses messages only during its calls; enough
# is in flight for a link of 1 Gbit/s to stay busy for some ten milliseconds between
# them.
OVERLAPPED = Schedule(1 << 20, 1, sum_delay=2, gather_delay=2, wait_delay=4)


def start_reduce_scatter(
    comm: MPI.Intracomm, shards: Sequence[Buffer], rows: Sequence[Buffer], tag: int
) -> list[MPI.Request]:
    """Start to send shard i to rank i, and to receive rank i's terms of this rank's shard as row i.

    Once the requests are done, the caller takes the sum of the rows.
    """
    return start_exchange(comm, _others(comm, shards, 1), _others(comm, rows, -1), tag)


def start_allgather(
    comm: MPI.Intracomm, shards: Sequence[Buffer], tag: int
) -> list[MPI.Request]:
    """Start to send this rank's shard to all ranks, and to receive theirs."""
    own = [shards[comm.rank]] * comm.size
    return start_exchange(comm, _others(comm, own, 1), _others(comm, shards, -1), tag)


def _others(
    comm: MPI.Intracomm, buffers: Sequence[Buffer], step: int
) -> Iterator[tuple[int, Buffer]]:
    """Yield the buffers for the ranks after this one, or before it: no two ranks' next is one."""
    for distance in range(1, comm.size):
        rank = (comm.rank + step * distance) % comm.size
        yield rank, buffers[rank]


class PairwiseAllreduce:
    """The sum over the ranks of a group, the same bits on every rank."""

    def __init__(self, group: ProcessGroup, schedule: Schedule = BLOCKING) -> None:
        """Use the group's communicator, tags and, if it is set, size of chunks (not collective)."""
        self._comm, self._tag, self._schedule = group.comm, group.tag, schedule
        self._size, self._rank = group.size, group.rank
        limit = group.settings.chunk_bytes or schedule.chunk_bytes
        even = schedule.received_chunks * limit // max(1, self._size - 1)
        self._shard_bytes = min(limit, max(even, LEAST_SHARD_BYTES))
        # What is received, for each round that is sent and not yet summed.
        self._received: list[Buffer] = [np.empty(0, np.uint8)] * (
            schedule.sum_delay + 1
        )
        # By elements and dtype: what is gathered, as MPI takes it and as rows.
        self._gathered: dict[
            tuple[int, np.dtype], tuple[list[Any], list[np.ndarray]]
        ] = {}

    def allreduce(
        self, pairs: Sequence[Pair], divisor: int = 1, op: np.ufunc = np.add
    ) -> None:
        """Write each source's sum over ranks, divided by ``divisor``, to its target (collective).

        Or the maximum or minimum. Dtypes are any of numbers, equal on all ranks, as
        lengths are. The sum is divided before it is rounded to that dtype, so that a
        mean that can be represented doesn't overflow.
        """
        large = []
        for source, target in pairs:
            if self._size == 1:
                if target is not source:
                    target[...] = source
            elif (self._size - 1) * source.nbytes > GATHER_BYTES:
                large.append((source, target))
            elif source.size:
                sum_rows(self._gather(source), target, divisor, op=op)
        todo = iter(large)
        self.stream(lambda _: next(todo, None), divisor, op)

    def stream(
        self,
        next_pair: Callable[[bool], Pair | None],
        divisor: int,
        op: np.ufunc = np.add,
    ) -> None:
        """Do what :meth:`allreduce` does, for pairs that come one by one (collective).

        Those that have come are on their way while others are waited for. ``next_pair``
        returns the next one; None after the last, and where there is none yet, unless
        it is to wait.
        """
        rounds: Iterator[tuple[list[Buffer], list[Buffer]]] = iter(())
        # The terms and the sums of each shard that is under way, by its number.
        in_flight: dict[int, tuple[list[Buffer], list[Buffer]]] = {}
        requests: dict[int, list[MPI.Request]] = {}
        for tick in itertools.count():
            shards = next(rounds, None)
            while shards is None and (pair := next_pair(not in_flight)) is not None:
                rounds = self._rounds(pair)
                shards = next(rounds, None)
            if shards is not None:
                in_flight[tick] = terms, _ = shards
                rows = self._rows(tick, terms)
                requests[tick] = start_reduce_scatter(
                    self._comm, terms, rows, self._tag
                )
            elif not in_flight:
                return
            if (number := tick - self._schedule.sum_delay) in in_flight:
                wait_all(requests[number])
                terms, sums = in_flight[number]
                self._sum(self._rows(number, terms), sums[self._rank], divisor, op)
            if (number := tick - self._schedule.gather_delay) in in_flight:
                # While one rank waits for a buffer, it sends sums before terms that
                # another receives in the other order.
                _, sums = in_flight[number]
                requests[number] = start_allgather(self._comm, sums, self._tag + 1)
            if (number := tick - self._schedule.wait_delay) in in_flight:
                wait_all(requests.pop(number))
                del in_flight[number]

    def reduce_scatter(
        self, sources: Sequence[np.ndarray], target: np.ndarray, op: np.ufunc = np.add
    ) -> None:
        """Write the sum over ranks of their ``sources[rank]``, or the maximum, to ``target``.

        Collective. Arrays are 1-D and contiguous; those for one rank have its target's
        length and dtype on all ranks.
        """
        widest = max(source.itemsize for source in sources)
        step = max(1, self._shard_bytes // widest)
        for start in range(0, max(source.size for source in sources), step):
            terms = [source[start : start + step] for source in sources]
            rows = self._rows(0, terms)
            wait_all(start_reduce_scatter(self._comm, terms, rows, self._tag))
            with overflow_errstate():
                self._sum(rows, target[start : start + step], 1, op)

    def _rounds(self, pair: Pair) -> Iterator[tuple[list[Buffer], list[Buffer]]]:
        """Yield the shards of each round, by rank, of the source and of the target."""
        step = self._size * max(1, self._shard_bytes // pair[0].itemsize)
        for start in range(0, pair[0].size, step):
            terms, sums = (array[start : start + step] for array in pair)
            slices = [
                shard_slice(terms.size, self._size, rank) for rank in range(self._size)
            ]
            yield [terms[each] for each in slices], [sums[each] for each in slices]

    def _rows(self, number: int, shards: list[Buffer]) -> list[Buffer]:
        """Return every rank's terms of this rank's shard: its own, and memory for the others'."""
        own = shards[self._rank]
        received = self._scratch(
            number % len(self._received), (self._size - 1) * own.nbytes
        )
        received = received.view(own.dtype)
        rows = [
            received[i * own.size : (i + 1) * own.size] for i in range(self._size - 1)
        ]
        rows.insert(self._rank, own)
        return rows

    def _scratch(self, index: int, nbytes: int) -> Buffer:
        if self._received[index].nbytes < nbytes:
            self._received[index] = np.empty(nbytes, np.uint8)
            self._gathered.clear()  # its views may be of the old memory
        return self._received[index][:nbytes]

    def _gather(self, buffer: np.ndarray) -> list[np.ndarray]:
        """Return every rank's buffer, in rank order."""
        key = buffer.size, buffer.dtype
        found = self._gathered.get(key)
        if found is None:
            count = self._size if self._size > 2 else 1
            memory = self._scratch(0, count * buffer.nbytes)
            if len(self._gathered) >= CACHED_LAYOUTS:
                self._gathered.clear()
            rows = list(memory.view(buffer.dtype).reshape(count, buffer.size))
            found = self._gathered[key] = [memory, MPI.BYTE], rows
        target, rows = found
        if self._size > 2:
            self._comm.Allgather([buffer, MPI.BYTE], target)
            return rows
        # Half the copies of an Allgather.
        peer = 1 - self._rank
        self._comm.Sendrecv(
            [buffer, MPI.BYTE], peer, self._tag, target, peer, self._tag
        )
        return [buffer, rows[0]] if self._rank == 0 else [rows[0], buffer]

    def _sum(self, rows: list[Buffer], out: Buffer, divisor: int, op: np.ufunc) -> None:
        """Sum the rows in rank order, divide, and write into ``out``, which may be one of them."""
        for start in range(0, out.size, BLOCK_ELEMENTS):
            block = slice(start, start + BLOCK_ELEMENTS)
            sum_rows([row[block] for row in rows], out[block], divisor, op=op)
