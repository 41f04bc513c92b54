"""Moves GPU buffers through NCCL, the one file that imports it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from .. import devices
from ..errors import CommunicationError, SharedFailure
from ..messaging import Handshake, Parts, ProcessGroup
from .connecting import OPERATION, connect

# The first version that reports asynchronous errors (ncclCommGetAsyncError).
OLDEST = (2, 4)
# The first version that sends and receives.
OLDEST_WITH_SEND = (2, 7)
# The first version that knows bfloat16.
OLDEST_WITH_BFLOAT16 = (2, 10)
# Of what NCCL sums as NumPy does: not float16, whose sums it rounds at each step. It has maxima
# and minima of floats, too, but those lose NaNs.
INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
SUMS = ("float32", "float64", *INTEGERS)
# How long `abort` waits for another thread that calls NCCL.
ABORT_SECONDS = 1.0


class NcclCommunicator:
    """NCCL among the GPUs of some ranks.

    Each method enqueues its work on a stream and returns at once; the result is in ``buffer`` when
    the stream gets there. Buffers are contiguous GPU arrays of float16, float32, float64 or the
    bits of bfloat16 in uint16, of equal sizes on all ranks. Sums are NCCL's: in an order and with
    roundings of its own, the same bits on every rank.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Connect the current devices (collective over ``comm``, which stays the caller's).

        CommunicationError is raised on all ranks where NCCL fails on one, or takes longer than
        CHAINERMN_NCCL_TIMEOUT says.
        """
        self._lock = threading.RLock()
        self.rank, self.size = comm.rank, comm.size
        handshake, where = Handshake(comm), f"rank {comm.rank}: {OPERATION}"
        with SharedFailure(handshake, OPERATION), devices.translated_errors(where):
            self._nccl = nccl = _nccl()
            names = ("float16", *SUMS)
            self._dtypes = {name: getattr(nccl, f"NCCL_{name.upper()}") for name in names}
            knows_bfloat16 = version(nccl.get_version()) >= OLDEST_WITH_BFLOAT16
            if knows_bfloat16 and hasattr(nccl, "NCCL_BFLOAT16"):
                self._dtypes["uint16"] = nccl.NCCL_BFLOAT16
            identity = nccl.get_unique_id() if comm.rank == 0 else None
        handshake(OPERATION)
        identity = comm.bcast(identity)
        self._comm: Any = connect(
            comm, lambda: nccl.NcclCommunicator(comm.size, identity, comm.rank)
        )

    def allreduce(self, buffer: Any, stream: Any) -> None:
        """Overwrite ``buffer`` by the sum over ranks, in the stream's order (collective)."""
        at, sum_ = devices.address(buffer), self._nccl.NCCL_SUM
        nccl_dtype = self.nccl_dtype(buffer.dtype)
        with self._opened() as comm:
            comm.allReduce(at, at, buffer.size, nccl_dtype, sum_, stream.ptr)

    def allreduce_each(
        self, sources: Sequence[Any], targets: Sequence[Any], op: np.ufunc, stream: Any
    ) -> None:
        """Write what ``op`` makes of each source over ranks into its target (collective)."""
        number = self._op(op)
        with self._opened() as comm, self._group():
            for source, target in zip(sources, targets, strict=True):
                if source.size:
                    to = devices.address(source), devices.address(target), source.size
                    comm.allReduce(*to, self.nccl_dtype(source.dtype), number, stream.ptr)

    def reduce_each(
        self, rows: Sequence[Sequence[Any]], targets: Sequence[Any], op: np.ufunc, stream: Any
    ) -> None:
        """Write what ``op`` makes of all ranks' row i into rank i's ``targets`` (collective)."""
        number = self._op(op)
        with self._opened() as comm, self._group():
            for root, row in enumerate(rows):
                for source, target in zip(row, targets if root == self.rank else row, strict=True):
                    if source.size:
                        to = devices.address(source), devices.address(target), source.size
                        comm.reduce(*to, self.nccl_dtype(source.dtype), number, root, stream.ptr)

    def exchange(self, outgoing: Parts, incoming: Parts, stream: Any) -> None:
        """Send arrays to other ranks, and overwrite those that come (collective)."""
        octet = self._nccl.NCCL_UINT8
        with self._opened() as comm, self._group():
            for call, parts in (comm.send, outgoing), (comm.recv, incoming):
                for rank, array in parts:
                    call(devices.address(array), array.nbytes, octet, rank, stream.ptr)

    def broadcast(self, parts: Parts, stream: Any) -> None:
        """Overwrite each array on all ranks by that of the rank beside it (collective)."""
        octet = self._nccl.NCCL_UINT8
        with self._opened() as comm, self._group():
            for root, array in parts:
                at = devices.address(array)
                comm.broadcast(at, at, array.nbytes, octet, root, stream.ptr)

    def _op(self, op: Any) -> int:
        names = {np.add: "SUM", np.maximum: "MAX", np.minimum: "MIN"}
        return int(getattr(self._nccl, f"NCCL_{names[op]}"))

    def reduce_shards(self, buffer: Any, shards: int, stream: Any) -> None:
        """Sum shard i over ranks into rank i's ``buffer``, for each shard (collective).

        Of ``buffer``, a multiple of ``shards`` elements, all but a rank's own shard are
        overwritten. There are no more shards than ranks.
        """
        at, size, step, nccl_dtype = self._shards(buffer, shards)
        sum_ = self._nccl.NCCL_SUM
        if shards == self.size:
            own = at + self.rank * step
            with self._opened() as comm:
                comm.reduceScatter(at, own, size, nccl_dtype, sum_, stream.ptr)
            return
        with self._opened() as comm, self._group():  # the reductions may then run side by side
            for root in range(shards):
                shard = at + root * step
                comm.reduce(shard, shard, size, nccl_dtype, sum_, root, stream.ptr)

    def gather_shards(self, buffer: Any, shards: int, stream: Any) -> None:
        """Copy rank i's shard i to all ranks, for each shard (collective)."""
        at, size, step, nccl_dtype = self._shards(buffer, shards)
        if shards == self.size:
            with self._opened() as comm:
                comm.allGather(at + self.rank * step, at, size, nccl_dtype, stream.ptr)
            return
        with self._opened() as comm, self._group():
            for root in range(shards):
                shard = at + root * step
                comm.broadcast(shard, shard, size, nccl_dtype, root, stream.ptr)

    @contextlib.contextmanager
    def _group(self) -> Iterator[None]:
        """Run the operations inside as one; an open group would swallow all later ones."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Any]:
        """Give CuPy's communicator, which another thread doesn't abort meanwhile."""
        with self._lock:
            if self._comm is None:
                raise CommunicationError(f"rank {self.rank}: NCCL was aborted, or closed")
            yield self._comm

    def _shards(self, buffer: Any, shards: int) -> tuple[int, int, int, int]:
        """Return the buffer's address, a shard's elements and bytes, and NCCL's dtype."""
        size = buffer.size // shards
        step = size * buffer.dtype.itemsize
        return devices.address(buffer), size, step, self.nccl_dtype(buffer.dtype)

    def check(self) -> None:
        """Raise NCCL's asynchronous error, if there is one (not collective).

        It doesn't wait for another thread that calls NCCL, and may itself wait for other ranks: it
        raises nothing then.
        """
        if self._lock.acquire(blocking=False):
            try:
                if self._comm is not None:
                    self._comm.check_async_error()
            finally:
                self._lock.release()

    def abort(self) -> None:
        """Abort what is in flight, whether or not the other ranks do; nothing works afterwards."""
        # A call of NCCL's in another thread returns at once, but for one that waits for a rank that
        # is gone: then only this ends it.
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

    def nccl_dtype(self, dtype: np.dtype) -> int:
        """Return NCCL's number for a buffer's dtype; raise ValueError where bfloat16 has none."""
        if dtype.name not in self._dtypes:
            found = _dotted(version(self._nccl.get_version()))
            raise ValueError(
                "gradients can't travel as bfloat16 through NCCL here: it takes NCCL "
                f"{_dotted(OLDEST_WITH_BFLOAT16)} (this is {found}) and a CuPy whose "
                "cupy.cuda.nccl has NCCL_BFLOAT16 (14 has); update them, or choose float16 or "
                "float32 as allreduce_grad_dtype, or the communicator 'flat'"
            )
        return int(self._dtypes[dtype.name])


def sums(dtype: np.dtype, op: np.ufunc) -> bool:
    """Return whether NCCL makes of such arrays what NumPy would."""
    return dtype.isnative and dtype.name in (SUMS if op is np.add else INTEGERS)


def abort_all(communicators: Sequence[NcclCommunicator]) -> None:
    """Abort communicators whose work goes by one stream; what fails is ignored.

    An abort returns when the work of its communicator is over, which may be behind that of another
    one on the stream. NCCL's group begins all aborts before it waits for any.
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
    found = version(nccl.get_version())
    if found < OLDEST:
        return f"NCCL is {_dotted(found)}, and {_dotted(OLDEST)} is the oldest that serves"
    return None


def can_exchange() -> bool:
    """Return whether this process can use NCCL for messages, too."""
    return unavailable_reason() is None and version(_nccl().get_version()) >= OLDEST_WITH_SEND


def version(code: int) -> tuple[int, ...]:
    """Return major and minor of NCCL's version code: 22203 is 2.22, and 2708 is 2.7."""
    major = 10_000 if code >= 10_000 else 1_000
    return code // major, code % major // 100


def check_devices(group: ProcessGroup) -> None:
    """Raise on all ranks if those of one node share a device, which NCCL can't (collective)."""
    operation, node = "asking which device this is", group.topology.inter_rank(group.rank)
    places: dict[tuple[int, str], list[int]] = {}
    with group.in_step(operation):
        bus_id = group.run_on_all_ranks(operation, devices.bus_id)
        rows = group.comm.allgather((node, bus_id))
    for rank, place in enumerate(rows):
        places.setdefault(place, []).append(rank)
    shared = [
        f"ranks {ranks} use device {bus}" for (_, bus), ranks in places.items() if len(ranks) > 1
    ]
    if shared:
        raise ValueError(
            f"{'; '.join(shared)}: NCCL wants one device a rank; call "
            "chainer.backends.cuda.get_device_from_id(comm.intra_rank).use() before the first "
            "gradients, with no more ranks on a node than it has devices"
        )


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _nccl() -> Any:
    from cupy.cuda import nccl

    return nccl
