"""Sums of GPU buffers between nodes by MPI: through pinned host memory, or as they are.

Both are the pairwise sum of :mod:`chainermn_comm.allreduce`, whose requests are polled: in a
blocking call of MPI a rank wouldn't notice that another has failed meanwhile.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from .. import devices
from ..allreduce import PairwiseAllreduce, overflow_errstate
from ..messaging import Buffer
from . import kernels

# Returns when the function that it is given returns True, or raises if that will never be.
Poll: TypeAlias = Callable[[Callable[[], bool]], None]

# MPI may read and write the memory of requests that nobody waits for any more, so they are kept.
_orphaned_requests: list[Sequence[MPI.Request]] = []


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


class PolledAllreduce(PairwiseAllreduce):
    """Sums GPU buffers, each of which is begun, and finished later."""

    gather_bytes = 0  # always shards, which are summed by `_sum`

    def __init__(self, comm: MPI.Intracomm, slots: int, poll: Poll) -> None:
        """Use ``comm``, which stays the caller's; its ranks are on different nodes.

        At most ``slots`` buffers are begun and not yet finished; ``poll`` waits for events and
        requests.
        """
        self._poll = poll
        self._ready = [devices.new_event() for _ in range(slots)]
        super().__init__(comm)

    def begin(self, slot: int, buffer: Any, stream: Any) -> None:
        """Record when ``buffer`` is ready in the stream's order; return at once."""
        self._ready[slot].record(stream)

    @abstractmethod
    def finish(self, slot: int, buffer: Any, dtype: np.dtype, stream: Any, divisor: int) -> None:
        """Overwrite ``buffer``, 1-D, by the sum over ranks of what was given to :meth:`begin`.

        The sum is divided by ``divisor`` before it is rounded to ``dtype``, that of the numbers,
        which the array may store as another one. The work before and after is in the stream's
        order.
        """

    def _wait(self, requests: Sequence[MPI.Request]) -> None:
        try:
            self._poll(partial(MPI.Request.Testall, requests))  # makes MPI progress them
        except BaseException:
            _orphaned_requests.append(requests)
            raise


class CudaAwareAllreduce(PolledAllreduce):
    """Gives MPI the GPU's memory; each rank sums its shard on its device.

    Sums are taken in rank order and in float32 or wider: the same bits as by
    :class:`StagedAllreduce`.
    """

    def __init__(self, comm: MPI.Intracomm, slots: int, poll: Poll) -> None:
        self._summed = devices.new_event()
        # The addresses of the rows that are summed, here and on the device.
        self._addresses = devices.pinned(8 * comm.size).view(np.int64)
        self._table = devices.empty(8 * comm.size)
        self._dtype, self._stream = np.dtype(np.float32), None
        super().__init__(comm, slots, poll)

    def finish(self, slot: int, buffer: Any, dtype: np.dtype, stream: Any, divisor: int) -> None:
        self._poll(lambda: self._ready[slot].done)  # MPI knows nothing of streams
        self._dtype, self._stream = dtype, stream
        self.allreduce([buffer], divisor)

    def close(self) -> None:
        super().close()
        self._table = devices.empty(0)
        self._addresses = np.empty(0, np.int64)

    def _allocate(self, nbytes: int) -> Buffer:
        return devices.empty(nbytes)

    def _sum(self, rows: list[Buffer], out: Buffer, divisor: int) -> None:
        if out.size:
            self._addresses[:] = [devices.address(row) for row in rows]
            devices.copy_to_device(self._addresses, self._table, self._stream)
            with self._stream:  # type: ignore[attr-defined]
                kernels.launch("sum", self._dtype, self._table, len(rows), out, out.size, divisor)
        self._summed.record(self._stream)
        self._poll(lambda: self._summed.done)


class StagedAllreduce(PolledAllreduce):
    """Copies buffers to the host, sums them there by MPI, and copies them back.

    The device can do other work while a buffer is copied to the host. Each slot holds one buffer at
    a time.
    """

    def __init__(self, comm: MPI.Intracomm, slots: int, poll: Poll) -> None:
        self._host = [np.empty(0, np.uint8)] * slots
        super().__init__(comm, slots, poll)

    def reserve(self, nbytes: int) -> None:
        if self._host[0].nbytes < nbytes:
            self._host = [devices.pinned(nbytes) for _ in self._host]
        super().reserve(nbytes)

    def begin(self, slot: int, buffer: Any, stream: Any) -> None:
        devices.copy_to_host(buffer, self._host[slot][: buffer.nbytes], stream)
        super().begin(slot, buffer, stream)

    def finish(self, slot: int, buffer: Any, dtype: np.dtype, stream: Any, divisor: int) -> None:
        self._poll(lambda: self._ready[slot].done)
        host = self._host[slot][: buffer.nbytes].view(dtype)
        with overflow_errstate() if divisor > 1 else np.errstate(all="ignore"):
            self.allreduce([host], divisor)
        devices.copy_to_device(host, buffer, stream)

    def close(self) -> None:
        super().close()
        self._host = [np.empty(0, np.uint8)] * len(self._host)
