"""Averages a stream of pieces of large arrays where they lie, one message after the other.

For ranks that share no memory. A piece passes stages: its shards are sent to the ranks that sum
them, this rank's shard is summed and sent to all, the others' sums are received. Some pieces are
at each stage, so that a rank which looks at its messages but now and then keeps the link busy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from ..runtime.progress import wait_all
from .reducer import Reducer
from .summation import sum_rows, telling_of_overflow

# Shards that come from all other ranks together, and pieces at each stage: enough for a link of
# 1 Gbit/s to be busy for some ten milliseconds. Messages get no shorter than the least, so from 128
# ranks on the memory grows: with 1,000 it is 24 MB.
CHUNK_BYTES, DEPTH = 1 << 20, 2
LEAST_SHARD_BYTES = 8 << 10
# Sums are taken in blocks that stay in cache; see `transports.mpi`.
SUM_ELEMENTS = 1 << 16
# Tags of messages.
TERMS, MEANS = 0, 1


class InPlace(Reducer):
    """The way of large arrays between ranks of which each has a node to itself."""

    def __init__(self, comm: MPI.Intracomm, chunk_bytes: int | None = None) -> None:
        """Duplicate ``comm`` (collective).

        Args:
            comm: all ranks, two or more; stays the caller's.
            chunk_bytes: what of a piece all other ranks together send to one; None for the default.
        """
        self._comm = comm.Dup()
        self._size, self._rank = comm.size, comm.rank
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        least = min(LEAST_SHARD_BYTES, chunk_bytes or CHUNK_BYTES)
        self._shard_bytes = max((chunk_bytes or CHUNK_BYTES) // len(self._others), least)
        self._room: list[np.ndarray] = []

    def mean(
        self,
        sources: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        wires: Sequence[np.dtype],
    ) -> None:
        """As :class:`Reducer` says, for arrays that travel in their own dtype."""
        for source, target in zip(sources, targets, strict=True):
            if target is not source:
                target[...] = source
        pieces = [piece for target in targets for piece in self._pieces(target.reshape(-1))]
        terms: dict[int, list[MPI.Request]] = {}
        means: dict[int, list[MPI.Request]] = {}
        self._reserve(pieces)
        with telling_of_overflow():
            for tick in range(len(pieces) + 2 * DEPTH):
                if tick < len(pieces):
                    terms[tick] = self._exchange(pieces[tick], self._rows(tick, pieces), TERMS)
                number = tick - DEPTH
                if 0 <= number < len(pieces):
                    wait_all(terms.pop(number))
                    self._sum(pieces[number], self._rows(number, pieces))
                    own = [pieces[number][self._rank]] * self._size
                    means[number] = self._exchange(own, pieces[number], MEANS)
                number = tick - 2 * DEPTH
                if 0 <= number < len(pieces):
                    wait_all(means.pop(number))

    def _pieces(self, flat: np.ndarray) -> list[list[np.ndarray]]:
        """The array cut into pieces, each a list of shards for all ranks."""
        step = max(1, self._shard_bytes // flat.itemsize) * self._size
        return [
            np.array_split(flat[start : start + step], self._size)
            for start in range(0, flat.size, step)
        ]

    def _reserve(self, pieces: list[list[np.ndarray]]) -> None:
        largest = max((piece[self._rank].nbytes for piece in pieces), default=0)
        if not self._room or self._room[0].nbytes < largest * len(self._others):
            count = DEPTH + 1  # one more than are on their way: one is summed
            self._room = [np.empty(largest * len(self._others), np.uint8) for _ in range(count)]

    def _rows(self, number: int, pieces: list[list[np.ndarray]]) -> list[np.ndarray]:
        """Every rank's numbers of this rank's shard: its own, and room for the others'."""
        own = pieces[number][self._rank]
        space = self._room[number % len(self._room)][: own.nbytes * len(self._others)]
        rows = list(space.view(own.dtype).reshape(len(self._others), own.size))
        rows.insert(self._rank, own)
        return rows

    def _sum(self, shards: list[np.ndarray], rows: list[np.ndarray]) -> None:
        mine = shards[self._rank]
        for start in range(0, mine.size, SUM_ELEMENTS):
            block = slice(start, start + SUM_ELEMENTS)
            sum_rows([row[block] for row in rows], mine[block], self._size)

    def _exchange(
        self, outgoing: list[np.ndarray], incoming: list[np.ndarray], tag: int
    ) -> list[MPI.Request]:
        comm, byte = self._comm, MPI.BYTE
        requests = [comm.Irecv([incoming[r], byte], r, tag) for r in self._others]
        return requests + [comm.Isend([outgoing[r], byte], r, tag) for r in self._others]

    def close(self) -> None:
        self._room = []
        self._comm.Free()
