"""Moves GPU buffers through NCCL; only this file imports NCCL."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..errors import CommunicationError, describe_exception
from . import devices

if TYPE_CHECKING:  # importing it starts MPI
    from mpi4py import MPI

Arrays: TypeAlias = Sequence[Any]
# Pairs of another rank and an array.
Parts: TypeAlias = Iterable[tuple[int, Any]]

# The first version with bfloat16. Every NCCL for CUDA 12 is newer. The doctor requires
# this version.
OLDEST = (2, 10)
# NCCL's number of bfloat16, for which CuPy has had a name since version 14.
BFLOAT16 = 9
# NCCL sums these as NumPy does. It sums float16, too, but rounds at each step.
INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
SUMS = ("float32", "float64", *INTEGERS)
# CuPy's names of NCCL's operations, by NumPy's ufunc. NCCL's maxima and minima of floats
# are missing, because they lose NaNs.
_OPERATIONS: dict[np.ufunc, str] = {
    np.add: "NCCL_SUM",
    np.maximum: "NCCL_MAX",
    np.minimum: "NCCL_MIN",
}
# How long `abort` waits for another thread that calls NCCL.
ABORT_SECONDS = 1.0


class NcclCommunicator:
    """NCCL among the GPUs of some ranks.

    Methods enqueue work on the current stream, and return at once. Arrays are contiguous
    and on this rank's GPU; bfloat16 arrays are passed as uint16. Sums have NCCL's order
    and roundings, and the same bits on every rank.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Connect the current devices (collective over ``comm``, which stays the caller's).

        The call blocks until all ranks have come. If NCCL fails on a rank, this rank
        raises CommunicationError, while other ranks may wait.
        """
        self._lock = threading.RLock()
        self.rank = comm.rank
        try:
            self._nccl = _nccl()
            identity = None
            if comm.rank == 0:
                identity = self._nccl.get_unique_id()
            identity = comm.bcast(identity)
            self._comm: Any = self._nccl.NcclCommunicator(
                comm.size, identity, comm.rank
            )
        except Exception as error:
            raise CommunicationError(
                f"rank {comm.rank} of {comm.size} can't be connected by NCCL: "
                f"{describe_exception(error)}. NCCL_DEBUG=INFO says more; communicator "
                "'non_cuda_aware' uses NCCL only inside of nodes, and 'flat' doesn't use it"
            ) from error

    def sum_in_place(self, buffer: Any) -> None:
        """Overwrite ``buffer`` by the sum over ranks (collective)."""
        self.allreduce([buffer], [buffer], np.add)

    def allreduce(self, sources: Arrays, targets: Arrays, op: np.ufunc) -> None:
        """Reduce each source by ``op`` over ranks into its target (collective)."""
        with self._group() as comm:
            stream = devices.current_stream().ptr
            for source, target in zip(sources, targets, strict=True):
                if target.size:
                    comm.allReduce(
                        devices.address(source),
                        devices.address(target),
                        target.size,
                        self._dtype(target.dtype),
                        self._operation(op),
                        stream,
                    )

    def reduce(self, sources: Arrays, target: Any, op: np.ufunc) -> None:
        """Reduce all ranks' i-th source by ``op`` into rank i's ``target`` (collective).

        There are sources for the first ranks or for all. Further ranks have no target.
        """
        with self._group() as comm:
            stream = devices.current_stream().ptr
            for root, source in enumerate(sources):
                received = 0  # NULL if this rank receives nothing
                if root == self.rank:
                    received = devices.address(target)
                if source.size:
                    comm.reduce(
                        devices.address(source),
                        received,
                        source.size,
                        self._dtype(source.dtype),
                        self._operation(op),
                        root,
                        stream,
                    )

    def exchange(self, outgoing: Parts, incoming: Parts) -> None:
        """Send arrays to other ranks, and overwrite those that come (collective)."""
        octet = self._nccl.NCCL_UINT8
        with self._group() as comm:
            stream = devices.current_stream().ptr
            for rank, array in outgoing:
                if array.size:
                    at = devices.address(array)
                    comm.send(at, array.nbytes, octet, rank, stream)
            for rank, array in incoming:
                if array.size:
                    at = devices.address(array)
                    comm.recv(at, array.nbytes, octet, rank, stream)

    def broadcast(self, parts: Parts) -> None:
        """Overwrite each array on all ranks by the array of its root (collective)."""
        octet = self._nccl.NCCL_UINT8
        with self._group() as comm:
            stream = devices.current_stream().ptr
            for root, array in parts:
                if array.size:
                    at = devices.address(array)
                    comm.broadcast(at, at, array.nbytes, octet, root, stream)

    @contextlib.contextmanager
    def _group(self) -> Iterator[Any]:
        """Yield CuPy's communicator, which another thread can't abort meanwhile.

        The operations inside form one group of NCCL's, so that they may run in parallel.
        """
        with self._lock:
            if self._comm is None:
                raise CommunicationError(
                    f"rank {self.rank}: NCCL was aborted, or closed"
                )
            self._nccl.groupStart()
            try:
                yield self._comm
            finally:  # an open group would delay all later operations for ever
                self._nccl.groupEnd()

    def _operation(self, op: np.ufunc) -> int:
        return int(getattr(self._nccl, _OPERATIONS[op]))

    def _dtype(self, dtype: np.dtype) -> int:
        """Return NCCL's number for a buffer's dtype."""
        if dtype.name == "uint16":
            return BFLOAT16
        return int(getattr(self._nccl, f"NCCL_{dtype.name.upper()}"))

    def check(self) -> None:
        """Raise NCCL's asynchronous error, if there is one (not collective).

        Another thread may call NCCL meanwhile, but not abort or close it.
        """
        if self._comm is not None:
            self._comm.check_async_error()

    def abort(self) -> None:
        """Abort work in flight, whether or not other ranks do; nothing works afterwards."""
        # A call of NCCL's in another thread returns at once, unless it waits for a rank
        # that is gone: then only an abort ends the call.
        locked = self._lock.acquire(timeout=ABORT_SECONDS)
        try:
            comm = self._comm
            self._comm = None
            if comm is not None:
                comm.abort()
        finally:
            if locked:
                self._lock.release()

    def close(self) -> None:
        """Release NCCL's resources; all work must be over."""
        with self._lock:
            comm = self._comm
            self._comm = None
            if comm is not None:
                comm.destroy()


def sums(dtype: np.dtype, op: np.ufunc) -> bool:
    """Return whether NCCL reduces such arrays as NumPy would."""
    if op is np.add:
        return dtype.isnative and dtype.name in SUMS
    return dtype.isnative and dtype.name in INTEGERS


def abort_all(communicators: Sequence[NcclCommunicator]) -> None:
    """Abort communicators whose work is on one stream; failures are ignored.

    An abort returns when the communicator's work has ended, which may be enqueued behind
    another communicator's work. In a group, NCCL begins all aborts before it waits.
    """
    with contextlib.suppress(Exception):
        _nccl().groupStart()
        try:
            for each in communicators:
                with contextlib.suppress(Exception):
                    each.abort()
        finally:
            _nccl().groupEnd()


def unavailable_reason() -> str | None:
    """Return why this process can't use NCCL; None if it can."""
    reason = devices.unavailable_reason()
    if reason is not None:
        return reason
    nccl = _nccl()
    if not nccl.available:
        return "CuPy finds no NCCL library: pip install nvidia-nccl-cu12, or -cu13 for CUDA 13"
    return None


def _nccl() -> Any:
    from cupy.cuda import nccl

    return nccl
