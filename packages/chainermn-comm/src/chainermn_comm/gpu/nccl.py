"""Moves GPU buffers through NCCL, the one file that imports it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from .. import devices
from ..errors import CommunicationError, raise_together
from ..messaging import Handshake, Parts, ProcessGroup
from .connecting import OPERATION, connect

Arrays: TypeAlias = Sequence[Any]
# The first version that knows bfloat16; every NCCL for CUDA 12 is newer.
OLDEST = (2, 10)
BFLOAT16 = 9  # NCCL's number, which CuPy has a name for since 14
# Of what NCCL sums as NumPy does: not float16, whose sums it rounds at each step. It
# has maxima and minima of floats, too, but those lose NaNs.
INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
SUMS = ("float32", "float64", *INTEGERS)
# How long `abort` waits for another thread that calls NCCL.
ABORT_SECONDS = 1.0


class NcclCommunicator:
    """NCCL among the GPUs of some ranks.

    Methods enqueue work on a stream, and return at once. Arrays are contiguous, on this
    rank's GPU; those of bfloat16 are its bits, uint16. Sums are NCCL's: in an order and
    with roundings of its own, the same bits on every rank.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Connect the current devices (collective over ``comm``, which stays the caller's).

        CommunicationError is raised on all ranks where NCCL fails on one, or takes
        longer than CHAINERMN_NCCL_TIMEOUT says.
        """
        self._lock = threading.RLock()
        self.rank, self.size = comm.rank, comm.size
        handshake, where = Handshake(comm), f"rank {comm.rank}: {OPERATION}"
        with raise_together(handshake, OPERATION), devices.translated_errors(where):
            self._nccl = nccl = _nccl()
            identity = nccl.get_unique_id() if comm.rank == 0 else None
        identity = comm.bcast(identity)
        self._comm: Any = connect(
            comm, lambda: nccl.NcclCommunicator(comm.size, identity, comm.rank)
        )

    def sum_in_place(self, buffer: Any, stream: Any) -> None:
        """Overwrite ``buffer`` by the sum over ranks (collective)."""
        self.allreduce([buffer], [buffer], np.add, stream)

    def allreduce(
        self, sources: Arrays, targets: Arrays, op: np.ufunc, stream: Any
    ) -> None:
        """Write what ``op`` makes of each source over ranks into its target (collective)."""
        with self._group() as comm:
            for source, target in zip(sources, targets, strict=True):
                if target.size:
                    comm.allReduce(*self._reduction(source, target, op), stream.ptr)

    def reduce(
        self, rows: Sequence[Arrays], targets: Arrays, op: np.ufunc, stream: Any
    ) -> None:
        """Write what ``op`` makes of all ranks' row i into rank i's ``targets`` (collective).

        Rows are of the first ranks, or of all; they stay as they are.
        """
        with self._group() as comm:
            for root, row in enumerate(rows):
                for source, target in zip(
                    row, targets if root == self.rank else row, strict=True
                ):
                    if target.size:
                        sent, received, *rest = self._reduction(source, target, op)
                        received *= root == self.rank  # NULL where nothing is received
                        comm.reduce(sent, received, *rest, root, stream.ptr)

    def exchange(self, outgoing: Parts, incoming: Parts, stream: Any) -> None:
        """Send arrays to other ranks, and overwrite those that come (collective)."""
        octet = self._nccl.NCCL_UINT8
        with self._group() as comm:
            for call, parts in (comm.send, outgoing), (comm.recv, incoming):
                for rank, array in parts:
                    call(devices.address(array), array.nbytes, octet, rank, stream.ptr)

    def broadcast(self, parts: Parts, stream: Any) -> None:
        """Overwrite each array on all ranks by that of the rank beside it (collective)."""
        octet = self._nccl.NCCL_UINT8
        with self._group() as comm:
            for root, array in parts:
                at = devices.address(array)
                comm.broadcast(at, at, array.nbytes, octet, root, stream.ptr)

    def reduce_shards(self, buffer: Any, shards: int, stream: Any) -> None:
        """Sum shard i over ranks into rank i's ``buffer``, for each shard (collective).

        Of ``buffer``, a multiple of ``shards`` elements, all but a rank's own shard are
        overwritten. There are no more shards than ranks.
        """
        parts = _split(buffer, shards)
        if shards < self.size:
            own = parts[self.rank : self.rank + 1]
            return self.reduce([[part] for part in parts], own, np.add, stream)
        with self._group() as comm:
            comm.reduceScatter(
                *self._reduction(buffer, parts[self.rank], np.add), stream.ptr
            )

    def gather_shards(self, buffer: Any, shards: int, stream: Any) -> None:
        """Copy rank i's shard i to all ranks, for each shard (collective)."""
        parts = _split(buffer, shards)
        if shards < self.size:
            return self.broadcast(enumerate(parts), stream)
        at, own = devices.address(buffer), parts[self.rank]
        with self._group() as comm:
            dtype = self._dtype(buffer.dtype)
            comm.allGather(devices.address(own), at, own.size, dtype, stream.ptr)

    @contextlib.contextmanager
    def _group(self) -> Iterator[Any]:
        """Give CuPy's communicator, which another thread doesn't abort meanwhile.

        Its operations run as one, so that they may run side by side.
        """
        with self._lock:
            if self._comm is None:
                raise CommunicationError(
                    f"rank {self.rank}: NCCL was aborted, or closed"
                )
            self._nccl.groupStart()
            try:
                yield self._comm
            finally:  # an open group would swallow all later operations
                self._nccl.groupEnd()

    def _reduction(self, source: Any, target: Any, op: Any) -> tuple[int, ...]:
        """Return addresses, elements, dtype and operation as NCCL's reductions take them."""
        names = {np.add: "SUM", np.maximum: "MAX", np.minimum: "MIN"}
        number = int(getattr(self._nccl, f"NCCL_{names[op]}"))
        addresses = devices.address(source), devices.address(target)
        return *addresses, target.size, self._dtype(target.dtype), number

    def check(self) -> None:
        """Raise NCCL's asynchronous error, if there is one (not collective).

        It doesn't wait for another thread that calls NCCL, and may itself wait for
        other ranks: it raises nothing then.
        """
        if self._lock.acquire(blocking=False):
            try:
                if self._comm is not None:
                    self._comm.check_async_error()
            finally:
                self._lock.release()

    def abort(self) -> None:
        """Abort what is in flight, whether or not the other ranks do; nothing works afterwards."""
        # A call of NCCL's in another thread returns at once, but for one that waits for
        # a rank that is gone: then only this ends it.
        locked = self._lock.acquire(timeout=ABORT_SECONDS)
        try:
            comm, self._comm = self._comm, None
            if comm is not None:
                comm.abort()
        finally:
            if locked:
                self._lock.release()

    def close(self) -> None:
        """Release NCCL's resources; all work must be over."""
        with self._lock:
            comm, self._comm = self._comm, None
            if comm is not None:
                comm.destroy()

    def _dtype(self, dtype: np.dtype) -> int:
        """Return NCCL's number for a buffer's dtype."""
        if dtype.name == "uint16":
            return BFLOAT16
        return int(getattr(self._nccl, f"NCCL_{dtype.name.upper()}"))


def connect_or_explain(
    group: ProcessGroup, operation: str, make: Callable[[], NcclCommunicator | None]
) -> tuple[NcclCommunicator | None, str]:
    """Return what ``make`` returns; None and a reason where it fails on a rank (collective)."""
    made, why = None, ""
    with raise_together(group.handshake, operation) as attempt:
        try:
            made = make()
        except (CommunicationError, ValueError) as error:
            why = str(error)
        attempt.payload = why.encode()
    reasons = [row.decode() for row in attempt.payloads if row]
    if reasons and made is not None:
        made.abort()
    return (None, reasons[0]) if reasons else (made, "")


def sums(dtype: np.dtype, op: np.ufunc) -> bool:
    """Return whether NCCL makes of such arrays what NumPy would."""
    return dtype.isnative and dtype.name in (SUMS if op is np.add else INTEGERS)


def abort_all(communicators: Sequence[NcclCommunicator]) -> None:
    """Abort communicators whose work goes by one stream; what fails is ignored.

    An abort returns when the work of its communicator is over, which may be behind that
    of another one on the stream. NCCL's group begins all aborts before it waits for
    any.
    """
    with contextlib.suppress(Exception), contextlib.ExitStack() as stack:
        if len(communicators) > 1:
            with contextlib.suppress(Exception):
                _nccl().groupStart()
                stack.callback(_nccl().groupEnd)
        for each in communicators:
            with contextlib.suppress(Exception):
                each.abort()


def unavailable_reason() -> str | None:
    """Return why this process can't use NCCL; None if it can."""
    reason = devices.unavailable_reason()
    if reason is not None:
        return reason
    nccl = _nccl()
    if not nccl.available:
        return "CuPy finds no NCCL library (cupy.cuda.nccl.available is False)"
    major, minor = OLDEST
    if (code := nccl.get_version()) < major * 10_000 + minor * 100:
        return (
            f"NCCL's version is {code}, and {major}.{minor} is the oldest that serves"
        )
    return None


def check_devices(group: ProcessGroup) -> None:
    """Raise on all ranks where NCCL can't serve, or two of a node share a device (collective)."""
    operation, node = (
        "asking which device this is",
        group.topology.inter_rank(group.rank),
    )

    def bus_id() -> str:
        if reason := unavailable_reason():
            raise RuntimeError(
                f"rank {group.rank}: NCCL can't take arrays on GPUs: {reason}"
            )
        return devices.bus_id()

    places: dict[tuple[int, str], list[int]] = {}
    with group.together(operation):
        own = bus_id()
    rows = group.comm.allgather((node, own))
    for rank, place in enumerate(rows):
        places.setdefault(place, []).append(rank)
    shared = [
        f"ranks {ranks} use device {bus}"
        for (_, bus), ranks in places.items()
        if len(ranks) > 1
    ]
    if shared:
        raise ValueError(
            f"{'; '.join(shared)}: NCCL wants one device a rank; call "
            "chainer.backends.cuda.get_device_from_id(comm.intra_rank).use() before the first "
            "gradients, with no more ranks on a node than it has devices"
        )


def _split(buffer: Any, shards: int) -> list[Any]:
    step = buffer.size // shards
    return [buffer[start : start + step] for start in range(0, buffer.size, step)]


def _nccl() -> Any:
    from cupy.cuda import nccl

    return nccl
