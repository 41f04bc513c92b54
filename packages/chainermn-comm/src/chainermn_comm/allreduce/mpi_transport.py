"""Moves buffers through MPI."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ..arrays import as_bytes
from ..messaging.transfer import pieces
from ..runtime.progress import wait_all
from .summation import sum_rows
from .transport import Transport

# While a rank receives no more than this, every rank gathers all buffers and sums them: one
# exchange where shards need two. With two ranks in a node, shards are faster from here on.
GATHER_BYTES = 256 << 10
# Of a shard. It, what is received for it and its sum stay in a core's cache: the best of 128 KiB to
# 2 MiB. Four ranks on two cores, which take turns, like it too: 24 MB took 36 ms, with a third 71.
CHUNK_BYTES = 2 << 20
# All other ranks together send so many chunks at once: with more ranks each shard is shorter,
# though not below the least, so that from 769 ranks on the memory grows.
RECEIVED_CHUNKS = 3
LEAST_SHARD_BYTES = 8 << 10
# Sums are taken in blocks, so that what NumPy allocates for one stays in cache and costs no page
# faults.
SUM_ELEMENTS = 1 << 16
# Layouts of gathered rows that are kept; models have few different sizes of small parameters.
KEPT_LAYOUTS = 256


class MpiTransport(Transport):
    """A transport over an mpi4py communicator, which it doesn't own.

    MPI's own reduction promises neither the order of a sum nor 16-bit types, so the sum is
    taken here: ranks exchange shards, each sums its own, and the sums are exchanged. That moves
    the bytes of a ring allreduce (Patarasuk and Yuan, 2009). Shards go from rank to rank
    directly: on MPICH 5.0.2, in a node, Alltoallv and Allgatherv took three times as long.
    """

    def __init__(self, comm: MPI.Intracomm, tag: int, chunk_bytes: int | None = None) -> None:
        """Use ``comm``, ``tag`` for messages on it, and shards of at most ``chunk_bytes``."""
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._comm = comm
        self._tag = tag
        chunk_bytes = chunk_bytes or CHUNK_BYTES
        even = RECEIVED_CHUNKS * chunk_bytes // max(1, self.size - 1)
        self._shard_bytes = min(chunk_bytes, max(even, LEAST_SHARD_BYTES))
        self._scratch = np.empty(0, np.uint8)
        # By (elements, dtype); see `_layout`.
        self._gathered: dict[tuple[int, np.dtype], tuple[list[Any], list[np.ndarray]]] = {}

    def allreduce(self, buffers: Sequence[np.ndarray], divisor: int = 1, lag: int = 0) -> None:
        if self.size == 1:
            return
        summed: deque[list[np.ndarray]] = deque()
        for buffer in buffers:
            if (self.size - 1) * buffer.nbytes <= GATHER_BYTES:
                if buffer.size:
                    sum_rows(self._gather(buffer), buffer, divisor)
                continue
            step = self.size * (self._shard_bytes // buffer.itemsize)
            for start in range(0, buffer.size, step):
                summed.append(self._sum_shard(buffer[start : start + step], divisor))
                if len(summed) > lag:
                    self._share(summed.popleft())
        while summed:
            self._share(summed.popleft())

    def bcast(self, buffer: np.ndarray, root: int) -> None:
        for piece in pieces([as_bytes(buffer)]):
            self._comm.Bcast([piece, MPI.BYTE], root)

    def close(self) -> None:
        self._scratch = np.empty(0, np.uint8)
        self._gathered.clear()

    def _gather(self, buffer: np.ndarray) -> list[np.ndarray]:
        """Every rank's buffer, in rank order."""
        target, rows = self._layout(buffer.size, buffer.dtype)
        if self.size > 2:
            self._comm.Allgather([buffer, MPI.BYTE], target)
            return rows
        # Half the copies of an Allgather: 1.1 to 2.4 times as fast, the more the larger.
        peer = 1 - self.rank
        self._comm.Sendrecv([buffer, MPI.BYTE], peer, self._tag, target, peer, self._tag)
        return [buffer, rows[0]] if self.rank == 0 else [rows[0], buffer]

    def _layout(self, size: int, dtype: np.dtype) -> tuple[list[Any], list[np.ndarray]]:
        """Scratch memory for what comes of such a buffer: as MPI takes it, and as rows."""
        found = self._gathered.get((size, dtype))
        if found is None:
            count = self.size if self.size > 2 else 1
            memory = self._space(count * size * dtype.itemsize)
            if len(self._gathered) >= KEPT_LAYOUTS:
                self._gathered.clear()
            rows = list(memory.view(dtype).reshape(count, size))
            found = self._gathered[size, dtype] = ([memory, MPI.BYTE], rows)
        return found

    def _sum_shard(self, chunk: np.ndarray, divisor: int) -> list[np.ndarray]:
        """Sum this rank's shard of the chunk; returns all of its shards."""
        shards = np.array_split(chunk, self.size)
        mine = shards[self.rank]
        space = self._space((self.size - 1) * mine.nbytes).view(chunk.dtype)
        rows = np.split(space, self.size - 1) if self.size > 2 else [space]
        rows.insert(self.rank, mine)
        self._exchange(shards, rows)
        for start in range(0, mine.size, SUM_ELEMENTS):
            block = slice(start, start + SUM_ELEMENTS)
            sum_rows([row[block] for row in rows], mine[block], divisor)
        return shards

    def _share(self, shards: list[np.ndarray]) -> None:
        """Give this rank's shard to all, and get theirs."""
        self._exchange([shards[self.rank]] * self.size, shards)

    def _exchange(self, outgoing: list[np.ndarray], incoming: list[np.ndarray]) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        byte = MPI.BYTE
        requests = [self._comm.Irecv([incoming[r], byte], r, self._tag) for r in others]
        requests += [self._comm.Isend([outgoing[r], byte], r, self._tag) for r in others]
        wait_all(requests)

    def _space(self, nbytes: int) -> np.ndarray:
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
            self._gathered.clear()  # its views are of the old memory
        return self._scratch[:nbytes]
