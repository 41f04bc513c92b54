"""Moves GPU buffers through pinned host memory and MPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from .. import devices
from ..allreduce.summation import sum_rows
from .requests import trade

# Sums are taken in blocks that stay in cache; see `mpi`.
SUM_ELEMENTS = 1 << 16


class StagedTransport:
    """An allreduce of GPU buffers in two calls, by way of host memory.

    The device can go on with other work while a buffer is on its way to the host. Buffers lie in
    slots, of which each holds one at a time. Ranks exchange shards, each sums its own in rank
    order and in float32 or wider, and the sums are exchanged. Messages are polled: a blocking call
    of MPI would hear of no rank that failed meanwhile.
    """

    def __init__(self, comm: MPI.Intracomm, slots: int) -> None:
        """Use ``comm``, which stays the caller's and carries nothing else."""
        self._comm = comm
        self._arrived = [devices.new_event() for _ in range(slots)]
        self._host = [np.empty(0, np.uint8)] * slots
        self._rows = np.empty(0, np.uint8)

    def reserve(self, nbytes: int) -> None:
        """Have room for buffers of so many bytes; nothing may be under way."""
        if self._host[0].nbytes < nbytes:
            self._host = [devices.pinned(nbytes) for _ in self._host]
            # Shards differ by an element, of at most 8 bytes.
            self._rows = np.empty(nbytes + 8 * self._comm.size, np.uint8)

    def begin(self, slot: int, buffer: Any, stream: Any) -> None:
        """Copy ``buffer`` to the host in the stream's order; returns at once."""
        devices.copy_to_host(buffer, self._host[slot][: buffer.nbytes], stream)
        self._arrived[slot].record(stream)

    def finish(
        self,
        slot: int,
        buffer: Any,
        dtype: np.dtype,
        stream: Any,
        divisor: int,
        wait: Callable[[Any], None],
    ) -> None:
        """Sum over ranks what :meth:`begin` copied, and copy it back in the stream's order.

        Args:
            slot: as given to :meth:`begin`.
            buffer: 1-D; gets the sum over ranks divided by ``divisor``.
            dtype: of the numbers in it, whatever the array says.
            stream: whose work comes before and after.
            divisor: the sum is divided by it before it is rounded.
            wait: returns when an event has happened.
        """
        wait(self._arrived[slot])
        host = self._host[slot][: buffer.nbytes].view(dtype)
        size, rank = self._comm.size, self._comm.rank
        shards = np.array_split(host, size)
        mine = shards[rank]
        room = self._rows[: mine.nbytes * size].view(dtype)
        rows = [room[other * mine.size : (other + 1) * mine.size] for other in range(size)]
        trade(self._comm, shards, rows, wait)
        rows[rank] = mine
        with np.errstate(over="raise" if divisor > 1 else "ignore", invalid="ignore"):
            for start in range(0, mine.size, SUM_ELEMENTS):
                block = slice(start, start + SUM_ELEMENTS)
                sum_rows([row[block] for row in rows], mine[block], divisor)
        trade(self._comm, [mine] * size, shards, wait)
        devices.copy_to_device(host, buffer, stream)

    def close(self) -> None:
        """Release the memory."""
        self._host = [np.empty(0, np.uint8)] * len(self._host)
        self._rows = np.empty(0, np.uint8)
