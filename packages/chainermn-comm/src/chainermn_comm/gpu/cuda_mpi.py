"""Moves GPU buffers through an MPI that takes them as they are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from .. import devices
from . import kernels
from .requests import trade


class CudaMpiTransport:
    """An allreduce of GPU buffers in two calls, as :class:`StagedTransport` has it.

    Ranks exchange shards, each sums its own on its device, and the sums are exchanged: in rank
    order and in float32 or wider, the bits that staging gives.
    """

    def __init__(self, comm: MPI.Intracomm, slots: int) -> None:
        """Use ``comm``, which stays the caller's and carries nothing else."""
        self._comm = comm
        self._ready = [devices.new_event() for _ in range(slots)]
        self._summed = devices.new_event()
        # The addresses of the rows that are summed, here and on the device.
        self._places = devices.pinned(8 * comm.size).view(np.int64)
        self._table = devices.empty(8 * comm.size)
        self._rows = devices.empty(0)

    def reserve(self, nbytes: int) -> None:
        """Have room for buffers of so many bytes; nothing may be under way."""
        # Shards differ by an element, of at most 8 bytes.
        needed = self._comm.size * (-(-nbytes // self._comm.size) + 8)
        if self._rows.nbytes < needed:
            self._rows = devices.empty(needed)

    def begin(self, slot: int, buffer: Any, stream: Any) -> None:
        """Note when ``buffer`` is ready in the stream's order; returns at once."""
        self._ready[slot].record(stream)

    def finish(
        self,
        slot: int,
        buffer: Any,
        dtype: np.dtype,
        stream: Any,
        divisor: int,
        wait: Callable[[Any], None],
    ) -> None:
        """Sum over ranks the buffer given to :meth:`begin`; see :class:`StagedTransport`."""
        wait(self._ready[slot])  # MPI knows nothing of streams
        size, rank = self._comm.size, self._comm.rank
        ends = [buffer.size * end // size for end in range(size + 1)]
        shards = [buffer[start:stop] for start, stop in pairwise(ends)]
        mine = shards[rank]
        room = self._rows[: mine.nbytes * size].view(buffer.dtype)
        rows = [room[other * mine.size : (other + 1) * mine.size] for other in range(size)]
        trade(self._comm, shards, rows, wait)
        if mine.size:
            rows[rank] = mine
            self._places[:] = [devices.address(row) for row in rows]
            devices.copy_to_device(self._places, self._table, stream)
            with stream:
                kernels.launch_sum(self._table, size, dtype, mine, divisor)
        self._summed.record(stream)
        wait(self._summed)
        trade(self._comm, [mine] * size, shards, wait)

    def close(self) -> None:
        """Release the memory."""
        self._rows = self._table = devices.empty(0)
        self._places = np.empty(0, np.int64)
