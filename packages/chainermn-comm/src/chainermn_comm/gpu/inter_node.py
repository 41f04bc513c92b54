"""Sums of GPU buffers between nodes by MPI: through pinned host memory, or as they are.

Where NCCL connects the nodes it takes these sums; this is for where it doesn't. Shards are
exchanged pairwise as in :mod:`chainermn_comm.allreduce.pairwise`, several chunks at a time, and
everything is polled: in a blocking call of MPI a rank wouldn't notice that another has failed.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

from .. import devices
from ..allreduce import (
    BLOCK_ELEMENTS,
    overflow_errstate,
    shard_slice,
    start_allgather,
    start_reduce_scatter,
    sum_rows,
)
from ..messaging import Buffer
from . import kernels

TAG = 0  # and the next one
# The phases of an exchange: its data aren't there yet, terms are on their way, sums are.
WAITS, SCATTERS, GATHERS, IS_OVER = range(4)


@cache
def mpi_takes_gpu_memory() -> bool:
    """Return whether this MPI says that it is CUDA-aware, by ``MPIX_Query_cuda_support()``.

    Open MPI, MPICH and MVAPICH have that function; an MPI without it counts as not aware. It is
    looked up in mpi4py's own library, whose dependencies are searched too.
    """
    try:
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return False
    query.argtypes, query.restype = [], ctypes.c_int
    return bool(query() == 1)


class MpiExchange(ABC):
    """Sums over the ranks of an mpi4py communicator, each on a node of its own.

    A slot holds one buffer at a time: first :meth:`begin`, then :meth:`run` to its end, then
    :meth:`end`. Sums are taken in rank order and in float32 or wider: the same bits by each kind.
    """

    streams: tuple[Any, ...]  # that work is enqueued on

    def __init__(self, comm: MPI.Intracomm, slots: int) -> None:
        """Use ``comm``, which stays the caller's (not collective)."""
        self._comm = comm
        self._ready = [devices.new_event() for _ in range(slots)]
        self._received: list[Buffer] = [self._allocate(0)] * slots  # the others' terms

    @abstractmethod
    def begin(self, slot: int, buffer: Any, after: Any) -> None:
        """Enqueue what brings ``buffer``, 1-D, to where MPI takes it, after that event."""

    def run(self, slot: int, buffer: Any, dtype: np.dtype, divisor: int) -> Iterator[int]:
        """Overwrite what was begun by its sum over ranks, divided by ``divisor`` (collective).

        Yields the phase in which it waits for something; the caller goes on with it later. Ranks
        must enter each phase of their buffers in the same order. ``dtype`` is that of the numbers,
        which the array may store as another one.
        """
        while not devices.is_done(self._ready[slot]):
            yield WAITS
        comm, size, rank = self._comm, self._comm.size, self._comm.rank
        whole = self._view(slot, buffer, dtype)
        shards = [whole[shard_slice(whole.size, size, other)] for other in range(size)]
        own = shards[rank]
        memory = self._received[slot][: (size - 1) * own.nbytes].view(own.dtype)
        rows = [memory[i * own.size : (i + 1) * own.size] for i in range(size - 1)]
        rows.insert(rank, own)
        yield from _wait(start_reduce_scatter(comm, shards, rows, TAG), SCATTERS)
        summed = self._sum(slot, rows, own, dtype, divisor)
        while summed is not None and not devices.is_done(summed):
            yield SCATTERS
        yield from _wait(start_allgather(comm, shards, TAG + 1), GATHERS)

    @abstractmethod
    def end(self, slot: int, buffer: Any, stream: Any) -> None:
        """Enqueue what brings the sum back to ``buffer``, before what follows on the stream."""

    def reserve(self, nbytes: int) -> None:
        """Allocate what buffers of so many bytes need; none may be begun."""
        shard = -(-nbytes // self._comm.size) + 8  # shards differ by an element, of at most 8 bytes
        if self._received[0].nbytes < (self._comm.size - 1) * shard:
            count = len(self._received)
            self._received = [self._allocate((self._comm.size - 1) * shard) for _ in range(count)]

    def close(self) -> None:
        """Release the memory."""
        self._received = []

    @abstractmethod
    def _allocate(self, nbytes: int) -> Buffer:
        """Return memory of the kind that is summed: (nbytes,) uint8."""

    @abstractmethod
    def _view(self, slot: int, buffer: Any, dtype: np.dtype) -> Buffer:
        """Return what MPI sends of a buffer that was begun."""

    @abstractmethod
    def _sum(
        self, slot: int, rows: list[Buffer], out: Buffer, dtype: np.dtype, divisor: int
    ) -> Any:
        """Write the rows' sum, divided, into ``out``; return the event after it, if any."""


def _wait(requests: Sequence[MPI.Request], phase: int) -> Iterator[int]:
    yield phase  # the chunk after this one may enter the phase now
    while not MPI.Request.Testall(requests):  # makes MPI progress them
        yield phase


class CudaAwareExchange(MpiExchange):
    """Gives MPI the GPU's memory; each rank sums its shard on its device."""

    def __init__(self, comm: MPI.Intracomm, slots: int) -> None:
        super().__init__(comm, slots)
        self._stream, self._summed = (
            devices.new_stream(),
            [devices.new_event() for _ in range(slots)],
        )
        self.streams = (self._stream,)
        # The addresses of the rows that are summed, here and on the device.
        self._addresses = devices.pinned(8 * comm.size * slots).view(np.int64).reshape(slots, -1)
        self._tables = [devices.empty(8 * comm.size) for _ in range(slots)]

    def begin(self, slot: int, buffer: Any, after: Any) -> None:
        self._stream.wait_event(after)
        self._ready[slot].record(self._stream)

    def end(self, slot: int, buffer: Any, stream: Any) -> None:
        pass  # MPI knows nothing of streams: all is over

    def close(self) -> None:
        super().close()
        self._tables, self._addresses = [], np.empty((0, 0), np.int64)

    def _allocate(self, nbytes: int) -> Buffer:
        return devices.empty(nbytes)

    def _view(self, slot: int, buffer: Any, dtype: np.dtype) -> Buffer:
        return buffer

    def _sum(
        self, slot: int, rows: list[Buffer], out: Buffer, dtype: np.dtype, divisor: int
    ) -> Any:
        if not out.size:
            return None
        self._addresses[slot] = [devices.address(row) for row in rows]
        devices.copy_to_device(self._addresses[slot], self._tables[slot], self._stream)
        with self._stream:
            kernels.launch("sum", dtype, self._tables[slot], len(rows), out, out.size, divisor)
        self._summed[slot].record(self._stream)
        return self._summed[slot]


class StagedExchange(MpiExchange):
    """Copies buffers to pinned host memory, sums them there, and copies them back.

    Either direction has a stream of its own, so that both go on side by side.
    """

    def __init__(self, comm: MPI.Intracomm, slots: int) -> None:
        super().__init__(comm, slots)
        self._down, self._up = self.streams = devices.new_stream(), devices.new_stream()
        self._uploaded = [devices.new_event() for _ in range(slots)]
        self._host = [np.empty(0, np.uint8)] * slots

    def reserve(self, nbytes: int) -> None:
        if self._host[0].nbytes < nbytes:
            self._host = [devices.pinned(nbytes) for _ in self._host]
        super().reserve(nbytes)

    def begin(self, slot: int, buffer: Any, after: Any) -> None:
        self._down.wait_event(after)
        self._down.wait_event(self._uploaded[slot])
        devices.copy_to_host(buffer, self._host[slot][: buffer.nbytes], self._down)
        self._ready[slot].record(self._down)

    def end(self, slot: int, buffer: Any, stream: Any) -> None:
        devices.copy_to_device(self._host[slot][: buffer.nbytes], buffer, self._up)
        self._uploaded[slot].record(self._up)
        stream.wait_event(self._uploaded[slot])

    def close(self) -> None:
        super().close()
        self._host = []

    def _allocate(self, nbytes: int) -> Buffer:
        return np.empty(nbytes, np.uint8)

    def _view(self, slot: int, buffer: Any, dtype: np.dtype) -> Buffer:
        return self._host[slot][: buffer.nbytes].view(dtype)

    def _sum(
        self, slot: int, rows: list[Buffer], out: Buffer, dtype: np.dtype, divisor: int
    ) -> Any:
        with overflow_errstate() if divisor > 1 else np.errstate(all="ignore"):
            for start in range(0, out.size, BLOCK_ELEMENTS):
                block = slice(start, start + BLOCK_ELEMENTS)
                sum_rows([row[block] for row in rows], out[block], divisor)
        return None
