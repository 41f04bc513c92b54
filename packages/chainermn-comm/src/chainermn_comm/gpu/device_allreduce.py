"""Means of gradients on GPUs: NCCL in each node, MPI between nodes.

A chunk is packed by one kernel, summed by NCCL, exchanged between nodes by MPI, and unpacked by one
kernel. The work of a chunk is enqueued on streams before the host waits for the chunk before it, so
the devices are busy while messages travel.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI

from .. import devices
from ..allreduce import Algorithm, Chunk, plan_chunks
from ..errors import CommunicationError
from ..messaging import Context, SharedFailure
from ..topology import Topology
from . import inter_node, kernels
from .error_notifier import ErrorNotifier
from .nccl import NcclCommunicator

# Neither is measured, since no GPU was at hand. NCCL wants tens of megabytes to reach its
# bandwidth; a message between hosts must be short beside the whole for their work to overlap.
NCCL_CHUNK_BYTES = 32 << 20
STAGED_CHUNK_BYTES = 4 << 20
# While one chunk is waited for, the next is in flight.
DEVICE_SLOTS = 2
# Between two polls of an event: long beside a poll, which keeps the host's core busy, and short
# beside what a chunk takes.
POLL_SECONDS = 20e-6
# How long a rank that failed waits for its device to finish copies and kernels of some chunks.
DRAIN_SECONDS = 5.0


@dataclass(frozen=True)
class _Call:
    """What one call needs; all of it must live until its work is over."""

    chunks: list[Chunk]
    host: np.ndarray  # rows of all tables, in pinned memory
    tables: list[Any]  # where they begin on the device: for each chunk to pack, then to unpack
    flats: tuple[Any, ...]  # the arrays that are read and written, 1-D


class DeviceAllreduce(Algorithm):
    """Means over one topology, on the device that is current when this is made."""

    def __init__(
        self, context: Context, topology: Topology, leaders: int = 1, staged: bool = False
    ) -> None:
        """Split the ranks by node and by leader, and make the NCCL communicators (collective).

        NCCL is used within the topology's nodes, where no two ranks use one device, and MPI between
        them: each node's ``leaders``, at most the ranks of the smallest node, exchange equal shares
        of every chunk. Where it is ``staged``, MPI gets host memory even if it is CUDA-aware.
        """
        comm, rank = context.comm, context.rank
        self._size = comm.size
        self._nodes = topology.inter_size
        self._leaders = leaders
        self._leader_index = topology.intra_rank(rank)
        # NCCL sums values that were divided before; the sums by MPI are divided after.
        self._nccl_sums = max(map(topology.nodes.count, topology.nodes)) > 1
        default = STAGED_CHUNK_BYTES if self._nodes > 1 else NCCL_CHUNK_BYTES
        self._chunk_bytes = context.chunk_bytes or default
        self._handshake = context.handshake
        self._failure = ""
        operation = "averaging gradients on GPUs"
        with SharedFailure(self._handshake, operation):
            self._device, self._stream = devices.current_device(), devices.new_stream()
            self._packed = [devices.new_event() for _ in range(DEVICE_SLOTS)]
            self._summed = [devices.new_event() for _ in range(DEVICE_SLOTS)]
            self._done = devices.new_event()
        self._handshake(operation)
        self._buffers: list[Any] = [devices.empty(0)] * DEVICE_SLOTS
        self._next_chunk = 0  # chunks so far
        is_leader = self._nodes > 1 and self._leader_index < leaders
        color = self._leader_index if is_leader else MPI.UNDEFINED
        self._inter = MPI.Intracomm(comm.Split(color, rank))
        direct = not staged and all(comm.allgather(inter_node.mpi_takes_gpu_memory()))
        make = inter_node.CudaAwareAllreduce if direct else inter_node.StagedAllreduce
        self._exchange = self._handshake.run_on_all_ranks(
            f"{operation}, between nodes",
            lambda: make(self._inter, DEVICE_SLOTS, self._wait) if is_leader else None,
        )
        node = MPI.Intracomm(comm.Split(topology.inter_rank(rank), rank))
        try:
            self._nccl = self._handshake.run_on_all_ranks(
                "making NCCL communicators",
                lambda: NcclCommunicator(node) if node.size > 1 else None,
            )
        finally:
            node.Free()
        self._errors = ErrorNotifier(comm)

    def mean(
        self, sources: Sequence[Any], targets: Sequence[Any], wire_dtypes: Sequence[Any]
    ) -> None:
        """Write the mean over ranks of each source into its target, and wait for it (collective).

        Sources and targets are CuPy arrays of this algorithm's device, in the order of the current
        stream; see :meth:`Algorithm.mean`. CommunicationError is raised where NCCL or CUDA failed,
        here or on another rank; the communicator can't average GPU gradients any more then.
        """
        with devices.use(self._device):
            call = self._handshake.run_on_all_ranks(
                "allreduce_grad on GPUs", lambda: self._prepare(sources, targets, wire_dtypes)
            )
            try:
                self._run(call)
            except BaseException as failure:  # those of a signal's handler too: the others wait
                self._fail(failure)
                if isinstance(failure, CommunicationError) or not isinstance(failure, Exception):
                    raise
                raise CommunicationError(
                    f"rank {self._errors.rank}: averaging gradients on GPUs failed: {self._failure}"
                ) from failure

    def _prepare(self, sources: Sequence[Any], targets: Sequence[Any], wire_dtypes: Any) -> _Call:
        if self._failure:
            raise CommunicationError(f"GPU gradients failed in an earlier call: {self._failure}")
        self._check(sources, wire_dtypes)
        flats = [target.reshape(-1) for target in targets]
        inputs = [devices.contiguous(source) for source in sources]
        sizes = tuple([flat.size for flat in flats])
        chunks = plan_chunks(sizes, tuple(wire_dtypes), self._chunk_bytes)
        # A chunk may be padded to equal shards.
        padding = self._leaders * max((wire.itemsize for wire in wire_dtypes), default=0)
        nbytes = max((chunk.nbytes for chunk in chunks), default=0) + padding
        if self._buffers[0].nbytes < nbytes:
            self._buffers = [devices.empty(nbytes) for _ in range(DEVICE_SLOTS)]
        if self._exchange is not None:
            self._exchange.reserve(-(-nbytes // self._leaders))
        rows = np.concatenate([kernels.segment_table(chunks, each) for each in (inputs, flats)])
        host, table = devices.pinned(rows.nbytes), devices.empty(rows.nbytes)
        host[...] = rows.reshape(-1).view(np.uint8)
        lengths = [(len(chunk.segments) + 1) * kernels.ROW_BYTES for chunk in chunks]
        tables = [table[start:] for start in accumulate([0, *lengths, *lengths[:-1]])]
        return _Call(chunks, host, tables, (*flats, *inputs))

    def _check(self, arrays: Sequence[Any], wire_dtypes: Sequence[Any]) -> None:
        for wire in set(wire_dtypes):
            if wire.name not in kernels.DTYPE_CODES:
                names = ", ".join(kernels.DTYPE_CODES)
                raise ValueError(f"on GPUs gradients travel as {names}, not as {wire}")
            if self._nccl is not None:
                self._nccl.nccl_dtype(kernels.storage_dtype(wire))
        for array in arrays:
            if array.device.id != self._device:
                raise ValueError(
                    f"a gradient lies on device {array.device.id}, and this communicator was "
                    f"first used on device {self._device}; keep to one device a rank"
                )

    def _run(self, call: _Call) -> None:
        compute = devices.current_stream()
        if call.chunks:
            devices.copy_to_device(call.host, call.tables[0], compute)
        first, count = self._next_chunk, len(call.chunks)
        for tick in range(count + 1):
            if tick < count:
                self._begin(first + tick, call.chunks[tick], call.tables[tick], compute)
            if tick:
                last, table = tick - 1, call.tables[count + tick - 1]
                self._finish(first + last, call.chunks[last], table, compute)
        self._next_chunk += count
        self._done.record(compute)
        self._wait(lambda: self._done.done)

    def _begin(self, number: int, chunk: Chunk, table: Any, compute: Any) -> None:
        slot, stream = number % DEVICE_SLOTS, self._stream
        padded, own = self._views(slot, chunk)
        divisor = self._size if self._nccl_sums else 1
        kernels.launch("pack", chunk.dtype, table, len(chunk.segments), padded, chunk.size, divisor)
        self._packed[slot].record(compute)
        stream.wait_event(self._packed[slot])
        if self._nodes == 1:
            if self._nccl is not None:
                self._nccl.allreduce(padded[: chunk.size], stream)
            return
        if self._nccl is not None:
            self._nccl.reduce_shards(padded, self._leaders, stream)
        if self._exchange is not None:
            self._exchange.begin(slot, own, stream)

    def _finish(self, number: int, chunk: Chunk, table: Any, compute: Any) -> None:
        slot, stream = number % DEVICE_SLOTS, self._stream
        padded, own = self._views(slot, chunk)
        if self._exchange is not None:
            divisor = 1 if self._nccl_sums else self._size
            self._exchange.finish(slot, own, chunk.dtype, stream, divisor)
        if self._nodes > 1 and self._nccl is not None:
            self._nccl.gather_shards(padded, self._leaders, stream)
        self._summed[slot].record(stream)
        compute.wait_event(self._summed[slot])
        kernels.launch("unpack", chunk.dtype, table, len(chunk.segments), padded, chunk.size)

    def _views(self, slot: int, chunk: Chunk) -> tuple[Any, Any]:
        """Return the chunk's buffer padded to equal shards, and this leader's shard, not padded."""
        shard = -(-chunk.size // self._leaders)
        padded = self._buffers[slot][: shard * self._leaders * chunk.dtype.itemsize]
        padded = padded.view(kernels.storage_dtype(chunk.dtype))
        start = min(self._leader_index * shard, chunk.size)
        return padded, padded[start : min(start + shard, chunk.size)]

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Poll until it is done, NCCL has an error, or another rank sends one."""
        while not is_done():
            self._errors.poll()
            if self._nccl is not None:
                self._nccl.check()
            time.sleep(POLL_SECONDS)
        if self._nccl is not None:
            self._nccl.check()  # work that failed may count as done

    def _fail(self, error: BaseException) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        self._errors.send(self._failure)
        if self._nccl is not None:
            self._nccl.abort()
        self._drain()

    def _drain(self) -> None:
        """Wait until the device has done its work: the memory that it uses is about to be freed."""
        end = time.monotonic() + DRAIN_SECONDS
        # A device that failed itself raises again, and does nothing any more.
        with contextlib.suppress(Exception), devices.use(self._device):
            for stream in (self._stream, devices.current_stream()):
                event = devices.new_event()
                event.record(stream)
                while not event.done and time.monotonic() < end:
                    time.sleep(POLL_SECONDS)

    def release_local(self) -> None:
        # NCCL aborts what is in flight; MPI's communicators stay.
        self._fail(CommunicationError("an exception left the communicator's block"))
        if self._exchange is not None:
            self._exchange.close()
        self._buffers = []

    def close(self) -> None:
        if self._nccl is not None:
            self._nccl.close()
        failed = self._errors.close()
        if self._exchange is not None:
            self._exchange.close()
            if not failed:  # else messages may be left here too
                self._inter.Free()
        self._buffers = []
