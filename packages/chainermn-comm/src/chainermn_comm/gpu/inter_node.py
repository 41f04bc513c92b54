"""Sums of GPU buffers between nodes by MPI, through page-locked host memory.

Where NCCL connects the nodes it takes these sums; this is for where it doesn't. Shards are
exchanged pairwise as in :mod:`chainermn_comm.allreduce.pairwise`, several chunks at a time, and
everything is polled: in a blocking call of MPI a rank wouldn't notice that another has failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

TAG = 0  # and the next one
# The phases of an exchange: its data aren't there yet, terms are on their way, sums are.
WAITS, SCATTERS, GATHERS, IS_OVER = range(4)


class MpiExchange:
    """Sums over the ranks of an mpi4py communicator, each on a node of its own.

    A slot holds one buffer at a time: first :meth:`begin`, then :meth:`run` to its end, then
    :meth:`end`. Sums are taken in rank order and in float32 or wider. Copies to host memory and
    back have a stream each, so that both go on side by side.
    """

    def __init__(self, comm: MPI.Intracomm, slots: int) -> None:
        """Use ``comm``, which stays the caller's (not collective)."""
        self._comm = comm
        self._down, self._up = self.streams = devices.new_stream(), devices.new_stream()
        self._ready = [devices.new_event() for _ in range(slots)]
        self._uploaded = [devices.new_event() for _ in range(slots)]
        self._host = [np.empty(0, np.uint8)] * slots
        self._received = list(self._host)  # the others' terms

    def begin(self, slot: int, buffer: Any, after: Any) -> None:
        """Enqueue what brings ``buffer``, 1-D, to the host, after that event."""
        self._down.wait_event(after)
        self._down.wait_event(self._uploaded[slot])
        devices.copy_to_host(buffer, self._host[slot][: buffer.nbytes], self._down)
        self._ready[slot].record(self._down)

    def run(self, slot: int, buffer: Any, dtype: np.dtype, divisor: int) -> Iterator[int]:
        """Sum what was begun over ranks, divided by ``divisor`` (collective).

        Yields the phase in which it waits for something; the caller goes on with it later. Ranks
        must enter each phase of their buffers in the same order. ``dtype`` is that of the numbers,
        which the array may store as another one.
        """
        while not devices.is_done(self._ready[slot]):
            yield WAITS
        comm, size, rank = self._comm, self._comm.size, self._comm.rank
        whole = self._host[slot][: buffer.nbytes].view(dtype)
        shards = [whole[shard_slice(whole.size, size, other)] for other in range(size)]
        own = shards[rank]
        memory = self._received[slot][: (size - 1) * own.nbytes].view(own.dtype)
        rows = [memory[i * own.size : (i + 1) * own.size] for i in range(size - 1)]
        rows.insert(rank, own)
        yield from _wait(start_reduce_scatter(comm, shards, rows, TAG), SCATTERS)
        with overflow_errstate() if divisor > 1 else np.errstate(all="ignore"):
            for start in range(0, own.size, BLOCK_ELEMENTS):
                block = slice(start, start + BLOCK_ELEMENTS)
                sum_rows([row[block] for row in rows], own[block], divisor)
        yield from _wait(start_allgather(comm, shards, TAG + 1), GATHERS)

    def end(self, slot: int, buffer: Any, stream: Any) -> None:
        """Enqueue what brings the sum back to ``buffer``, before what follows on the stream."""
        devices.copy_to_device(self._host[slot][: buffer.nbytes], buffer, self._up)
        self._uploaded[slot].record(self._up)
        stream.wait_event(self._uploaded[slot])

    def reserve(self, nbytes: int) -> None:
        """Allocate what buffers of ``nbytes`` bytes need; none may be begun."""
        if self._host[0].nbytes < nbytes:
            self._host = [devices.pinned(nbytes) for _ in self._host]
        shard = -(-nbytes // self._comm.size) + 8  # shards differ by an element, of at most 8 bytes
        if self._received[0].nbytes < (self._comm.size - 1) * shard:
            received = (self._comm.size - 1) * shard
            self._received = [np.empty(received, np.uint8) for _ in self._host]

    def close(self) -> None:
        """Release the memory."""
        self._host, self._received = [], []


def _wait(requests: Sequence[MPI.Request], phase: int) -> Iterator[int]:
    yield phase  # the chunk after this one may enter the phase now
    while not MPI.Request.Testall(requests):  # makes MPI progress them
        yield phase
