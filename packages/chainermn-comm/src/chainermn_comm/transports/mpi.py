"""Moves buffers through MPI's own collectives."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ..arrays import as_bytes
from ..exchange import pieces
from ..summation import sum_rows
from ..transport import Transport

# Up to here every rank gathers all buffers and sums them: one exchange where shards need two.
GATHER_BYTES = 16 << 10
# A chunk and the shards received for it stay in a core's cache.
CHUNK_BYTES = 1 << 20


class MpiTransport(Transport):
    """A transport over an mpi4py communicator, which it doesn't own.

    MPI's own reduction promises neither the order of a sum nor 16-bit types, so the sum is
    taken here: ranks exchange shards, each sums its own, and the sums are gathered. That moves
    the bytes of a ring allreduce (Patarasuk and Yuan, 2009).
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._comm = comm
        self._scratch = np.empty(0, np.uint8)

    def allreduce(self, buffer: np.ndarray, divisor: int = 1) -> np.ndarray:
        if buffer.size == 0:
            return buffer
        if self.size == 1:
            sum_rows(buffer[None], buffer, divisor)
        elif buffer.nbytes <= GATHER_BYTES:
            self._gather_and_sum(buffer, divisor)
        else:
            step = CHUNK_BYTES // buffer.itemsize
            for start in range(0, buffer.size, step):
                self._sum_shards(buffer[start : start + step], divisor)
        return buffer

    def bcast(self, buffer: np.ndarray, root: int) -> np.ndarray:
        for piece in pieces([as_bytes(buffer)]):
            self._comm.Bcast([piece, MPI.BYTE], root)
        return buffer

    def close(self) -> None:
        self._scratch = np.empty(0, np.uint8)

    def _gather_and_sum(self, buffer: np.ndarray, divisor: int) -> None:
        rows = self._rows(self.size, buffer.size, buffer.dtype)
        self._comm.Allgather([as_bytes(buffer), MPI.BYTE], [as_bytes(rows), MPI.BYTE])
        sum_rows(rows, buffer, divisor)

    def _sum_shards(self, chunk: np.ndarray, divisor: int) -> None:
        # Rank r owns chunk[starts[r] : starts[r + 1]]; the first shards take the remainder.
        base, extra = divmod(chunk.size, self.size)
        counts = [base + (rank < extra) for rank in range(self.size)]
        starts = [base * rank + min(rank, extra) for rank in range(self.size)]
        item = chunk.itemsize
        shards = [n * item for n in counts], [n * item for n in starts]
        mine = counts[self.rank]
        rows = self._rows(self.size, mine, chunk.dtype)
        memory = as_bytes(chunk)
        received = [mine * item] * self.size, [mine * item * r for r in range(self.size)]
        self._comm.Alltoallv([memory, shards, MPI.BYTE], [as_bytes(rows), received, MPI.BYTE])
        if mine:
            start = starts[self.rank]
            sum_rows(rows, chunk[start : start + mine], divisor)
        self._comm.Allgatherv(MPI.IN_PLACE, [memory, shards, MPI.BYTE])

    def _rows(self, rows: int, columns: int, dtype: np.dtype) -> np.ndarray:
        nbytes = rows * columns * dtype.itemsize
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype).reshape(rows, columns)
