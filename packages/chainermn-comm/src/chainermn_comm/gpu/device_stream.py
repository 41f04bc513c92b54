"""Averages a stream of chunks that lie on GPUs: NCCL in each node, MPI between nodes.

A chunk is packed by one kernel, summed by NCCL, exchanged between nodes through host memory, and
unpacked by one kernel. The work of a chunk is put on streams before the host waits for the chunk
before it; so the devices are busy while messages travel.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from .. import devices
from ..allreduce.buckets import Chunk, cut
from ..allreduce.reducer import Reducer
from ..errors import CommunicationError
from ..messaging.handshake import Agreement, prepare
from ..topology import Topology
from . import cuda_aware, kernels
from .cuda_mpi import CudaMpiTransport
from .error_broadcast import Alarm
from .nccl import NcclTransport
from .staged import StagedTransport

# Neither is measured, since no GPU was at hand. NCCL wants tens of megabytes to reach its
# bandwidth; a message between hosts must be short beside the whole for their work to overlap.
NCCL_CHUNK_BYTES = 32 << 20
STAGED_CHUNK_BYTES = 4 << 20
# While one chunk is waited for, the next is under way.
SLOTS = 2
# Between two looks at an event; a look takes the host about a microsecond.
POLL_SECONDS = 20e-6
# How long a rank that failed waits for its device to finish copies and kernels of some chunks.
SETTLE_SECONDS = 5.0


@dataclass(frozen=True)
class _Call:
    """What one call needs; all of it must live until its work is over.

    Attributes:
        chunks: in order.
        host: rows of all tables, in pinned memory.
        table: room for them on the device.
        packing, unpacking: for each chunk, where in ``table`` its rows begin.
        flats: the arrays that are read and written, 1-D.
    """

    chunks: list[Chunk]
    host: np.ndarray
    table: Any
    packing: list[Any]
    unpacking: list[Any]
    flats: tuple[Any, ...]


def _streams_and_events() -> tuple[int, Any, list[Any], list[Any], Any]:
    """The current device's number, a stream, an event for each slot, another for each, and one."""
    packed, summed = [[devices.new_event() for _ in range(SLOTS)] for _ in range(2)]
    return devices.current_device(), devices.new_stream(), packed, summed, devices.new_event()


class DeviceStream(Reducer):
    """The way of GPU gradients over one topology; all on the device that was current then."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        topology: Topology,
        lanes: int,
        chunk_bytes: int | None,
        staged: bool = False,
    ) -> None:
        """Split ``comm`` by node and by lane, and make the node's NCCL communicator.

        Args:
            comm: all ranks, each with a device that no other has; stays the caller's.
            topology: within its nodes NCCL serves, between them MPI.
            lanes: ranks of each node that exchange with other nodes, at most the ranks of the
                smallest node; each carries an equal share of every chunk.
            chunk_bytes: the size of chunks; None for the default.
            staged: whether MPI gets host memory even where it takes GPU memory on all ranks.
        """
        rank = comm.rank
        self._size = comm.size
        self._nodes = topology.inter_size
        self._lanes = lanes
        self._lane = topology.intra_rank(rank)
        # NCCL's sums are of values divided before; MPI's are taken here, and divided after.
        self._nccl_sums = max(topology.nodes.count(node) for node in topology.nodes) > 1
        default = STAGED_CHUNK_BYTES if self._nodes > 1 else NCCL_CHUNK_BYTES
        self._chunk_bytes = chunk_bytes or default
        self._agreement = Agreement(comm)
        self._failure = ""
        made, problem = prepare(_streams_and_events)
        self._agreement("averaging gradients on GPUs", problem=problem)
        self._device, self._stream, self._packed, self._summed, self._done = made
        self._buffers: list[Any] = []
        self._room = 0
        self._next = 0  # chunks so far
        in_lane = self._nodes > 1 and self._lane < lanes
        self._inter = MPI.Intracomm(comm.Split(self._lane if in_lane else MPI.UNDEFINED, rank))
        direct = not staged and comm.allreduce(cuda_aware.mpi_takes_gpu_memory(), MPI.LAND)
        made, problem = prepare(lambda: self._between_nodes(direct) if in_lane else None)
        self._agreement("averaging gradients on GPUs, between nodes", problem=problem)
        self._exchange = made
        self._nccl = self._meet(comm, topology)
        self._alarm = Alarm(comm)

    def _between_nodes(self, direct: bool) -> StagedTransport | CudaMpiTransport:
        if direct:
            return CudaMpiTransport(self._inter, SLOTS)
        return StagedTransport(self._inter, SLOTS)

    def _meet(self, comm: MPI.Intracomm, topology: Topology) -> NcclTransport | None:
        node = MPI.Intracomm(comm.Split(topology.inter_rank(comm.rank), comm.rank))
        made: NcclTransport | None
        try:
            made, problem = prepare(lambda: NcclTransport(node) if node.size > 1 else None)
        finally:
            node.Free()
        self._agreement("making NCCL communicators", problem=problem)
        return made

    def mean(self, sources: Sequence[Any], targets: Sequence[Any], wires: Sequence[Any]) -> None:
        """Write the mean over ranks of each source into its target, as :class:`Reducer` says.

        Sources and targets are CuPy arrays of this reducer's device, in the order of the
        current stream. Returns when the means are there.

        Raises:
            ValueError: arrays lie on another device, or a wire dtype isn't one for GPUs or for
                this NCCL.
            CommunicationError: NCCL or CUDA failed, here or on another rank; the communicator
                can't average GPU gradients any more.
        """
        with devices.use(self._device):
            call, problem = prepare(lambda: self._prepared(sources, targets, wires))
            self._agreement("allreduce_grad on GPUs", problem=problem)
            try:
                self._run(call)
            except CommunicationError as error:
                self._fail(error)
                raise
            except Exception as error:
                self._fail(error)
                raise CommunicationError(
                    f"rank {self._alarm.rank}: averaging gradients on GPUs failed: {self._failure}"
                ) from error
            except BaseException as error:  # of a signal's handler: the others wait
                self._fail(error)
                raise

    def _prepared(self, sources: Sequence[Any], targets: Sequence[Any], wires: Any) -> _Call:
        if self._failure:
            raise CommunicationError(f"GPU gradients failed in an earlier call: {self._failure}")
        self._check(sources, wires)
        flats = [target.reshape(-1) for target in targets]
        inputs = [devices.contiguous(source) for source in sources]
        chunks = cut(tuple([flat.size for flat in flats]), tuple(wires), self._chunk_bytes)
        # A chunk may be padded to equal shards.
        padding = self._lanes * max((wire.itemsize for wire in wires), default=0)
        self._reserve(max((chunk.nbytes for chunk in chunks), default=0) + padding)
        rows = np.concatenate([kernels.rows(chunks, inputs), kernels.rows(chunks, flats)])
        host, table = devices.pinned(rows.nbytes), devices.empty(rows.nbytes)
        host[...] = rows.reshape(-1).view(np.uint8)
        ends = np.cumsum([(len(chunk.parts) + 1) * kernels.ROW_BYTES for chunk in chunks])
        starts = [0, *ends.tolist()]
        return _Call(
            chunks,
            host,
            table,
            [table[start:] for start in starts[:-1]],
            [table[starts[-1] + start :] for start in starts[:-1]],
            (*flats, *inputs),
        )

    def _check(self, arrays: Sequence[Any], wires: Sequence[Any]) -> None:
        for wire in set(wires):
            if wire.name not in kernels.LETTERS:
                names = ", ".join(kernels.LETTERS)
                raise ValueError(f"on GPUs gradients travel as {names}, not as {wire}")
            if self._nccl is not None:
                self._nccl.kind(kernels.stored(wire))
        for array in arrays:
            if array.device.id != self._device:
                raise ValueError(
                    f"a gradient lies on device {array.device.id}, and this communicator was "
                    f"first used on device {self._device}; keep to one device a rank"
                )

    def _reserve(self, nbytes: int) -> None:
        if self._room < nbytes:
            self._buffers = [devices.empty(nbytes) for _ in range(SLOTS)]
            self._room = nbytes
        if self._exchange is not None:
            self._exchange.reserve(-(-nbytes // self._lanes))

    def _run(self, call: _Call) -> None:
        compute = devices.current_stream()
        if call.chunks:
            devices.copy_to_device(call.host, call.table, compute)
        for tick in range(len(call.chunks) + 1):
            if tick < len(call.chunks):
                self._begin(self._next + tick, call.chunks[tick], call.packing[tick], compute)
            if tick:
                chunk, table = call.chunks[tick - 1], call.unpacking[tick - 1]
                self._finish(self._next + tick - 1, chunk, table, compute)
        self._next += len(call.chunks)
        self._done.record(compute)
        self._wait(self._done)

    def _begin(self, number: int, chunk: Chunk, table: Any, compute: Any) -> None:
        slot, stream = number % SLOTS, self._stream
        padded, own = self._views(slot, chunk)
        kernels.launch("pack", table, chunk, padded, self._size if self._nccl_sums else 1)
        self._packed[slot].record(compute)
        stream.wait_event(self._packed[slot])
        if self._nodes == 1:
            if self._nccl is not None:
                self._nccl.allreduce(padded[: chunk.size], stream)
            return
        if self._nccl is not None:
            self._nccl.reduce_shards(padded, self._lanes, stream)
        if self._exchange is not None:
            self._exchange.begin(slot, own, stream)

    def _finish(self, number: int, chunk: Chunk, table: Any, compute: Any) -> None:
        slot, stream = number % SLOTS, self._stream
        padded, own = self._views(slot, chunk)
        if self._exchange is not None:
            divisor = 1 if self._nccl_sums else self._size
            self._exchange.finish(slot, own, chunk.dtype, stream, divisor, self._wait)
        if self._nodes > 1 and self._nccl is not None:
            self._nccl.gather_shards(padded, self._lanes, stream)
        self._summed[slot].record(stream)
        compute.wait_event(self._summed[slot])
        kernels.launch("unpack", table, chunk, padded)

    def _views(self, slot: int, chunk: Chunk) -> tuple[Any, Any]:
        """The chunk's buffer padded to equal shards, and this lane's shard without padding."""
        shard = -(-chunk.size // self._lanes)
        padded = self._buffers[slot][: shard * self._lanes * chunk.dtype.itemsize]
        padded = padded.view(kernels.stored(chunk.dtype))
        start = min(self._lane * shard, chunk.size)
        return padded, padded[start : min(start + shard, chunk.size)]

    def _wait(self, event: Any) -> None:
        """Poll until the event has happened, NCCL has an error, or another rank tells of one."""
        while not event.done:
            self._alarm.check()
            if self._nccl is not None:
                self._nccl.check()
            time.sleep(POLL_SECONDS)
        if self._nccl is not None:
            self._nccl.check()  # work that failed may count as done

    def _fail(self, error: BaseException) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        self._alarm.ring(self._failure)
        if self._nccl is not None:
            self._nccl.abort()
        self._settle()

    def _settle(self) -> None:
        """Let the device finish what it was given: the memory that it works on is about to go."""
        end = time.monotonic() + SETTLE_SECONDS
        # A device that failed itself says so again, and does nothing any more.
        with contextlib.suppress(Exception), devices.use(self._device):
            for stream in (self._stream, devices.current_stream()):
                event = devices.new_event()
                event.record(stream)
                while not event.done and time.monotonic() < end:
                    time.sleep(POLL_SECONDS)

    def abandon(self) -> None:
        """Release what needs no other rank, and tell those that wait for this one (not collective).

        NCCL ends what is under way; MPI's communicators stay.
        """
        self._fail(CommunicationError("an exception left the communicator's block"))
        if self._exchange is not None:
            self._exchange.close()
        self._buffers = []

    def close(self) -> None:
        """Destroy the NCCL communicator and free everything else."""
        if self._nccl is not None:
            self._nccl.close()
        failed = self._alarm.close()
        if self._exchange is not None:
            self._exchange.close()
            if not failed:  # else messages may be left here too
                self._inter.Free()
        self._buffers = []
