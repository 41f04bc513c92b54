"""Means of gradients on GPUs: NCCL in each node and between nodes, or MPI between them.

Where NCCL takes all sums a call only enqueues the work of a :class:`Pipeline`, and the current
stream waits for its end; a :class:`Watcher` looks after it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from .. import devices
from ..allreduce import Algorithm, NextOperand, Operand, plan_chunks
from ..messaging import Context
from ..topology import Topology
from . import kernels
from .backend import in_background
from .inter_node import IS_OVER, WAITS
from .links import connect_ranks
from .pipeline import MPI_SLOTS, Call, Pipeline
from .tables import TableCache
from .watcher import Watcher

OPERATION = "averaging gradients on GPUs"
# Neither is measured, since that takes several GPUs. NCCL wants tens of megabytes to reach its
# bandwidth; a message between hosts must be short beside the whole for their work to overlap.
NCCL_CHUNK_BYTES = 32 << 20
MPI_CHUNK_BYTES = 4 << 20
# Calls whose shapes are known to fit on all ranks.
MOST_KNOWN = 4096


class DeviceAllreduce(Algorithm):
    """Means over one topology, on the device that is current when this is made."""

    def __init__(
        self, context: Context, topology: Topology, leaders: int = 1, between: str = "nccl"
    ) -> None:
        """Connect the ranks, as :func:`connect_ranks` says (collective)."""
        self._context = context
        with context.in_step(OPERATION):
            self._device, self._pipeline = context.run_on_all_ranks(
                OPERATION, lambda: (devices.current_device(), Pipeline())
            )
            self._links = links = connect_ranks(context, topology, leaders, between, MPI_SLOTS)
        self._watcher = Watcher(context, self._device, self._pipeline, OPERATION)
        index = topology.intra_rank(context.rank)
        self._pipeline.connect(links, context.size, leaders, index, context.reduce_dtype)
        default = NCCL_CHUNK_BYTES if links.all_by_nccl else MPI_CHUNK_BYTES
        self._chunk_bytes = context.chunk_bytes or default
        self._num_chunks = 0  # so far
        self._known: set[Any] = set()
        self._watcher.nccls = [nccl for nccl in (links.node, links.inter) if nccl is not None]
        self._tables = TableCache(partial(self._watcher.add, self._pipeline.unpack))

    def allreduce(self, operand: Operand) -> None:
        """Write the mean over ranks of each source into its target (collective).

        Sources and targets are CuPy arrays of this algorithm's device, in the order of the current
        stream. If NCCL takes all sums, this returns before that is done. Where NCCL or CUDA fails,
        then or later, the job ends.
        """
        prepare = partial(self._prepare, operand)
        key = _key(operand)
        if key not in self._known:
            call = self._context.run_on_all_ranks(OPERATION, prepare)
        else:
            with self._watcher.ending():
                call = prepare()
        self._run(key, call)

    def prepare(self, operand: Operand) -> Callable[[], None]:
        with devices.translated_errors(self._watcher.told):
            call = self._prepare(operand)
        return partial(self._run, _key(operand), call)

    def stream(self, next_operand: NextOperand) -> None:
        with in_background(self._watcher):
            super().stream(next_operand)

    def _prepare(self, operand: Operand) -> Call:
        """Do what needs no other rank, and writes to no target; may raise on this rank alone."""
        sources, targets, wire_dtypes = operand[:3]
        with devices.use(self._device):
            with self._watcher.ending():
                self._watcher.look()
            self._check((*sources, *targets), wire_dtypes)
            flats = [target.reshape(-1) for target in targets]
            inputs = [
                flat if source is target else devices.contiguous(source)
                for flat, source, target in zip(flats, sources, targets, strict=True)
            ]
            sizes = tuple([flat.size for flat in flats])
            chunks = plan_chunks(sizes, tuple(wire_dtypes), self._chunk_bytes)
            pipeline = self._pipeline
            pipeline.reserve(chunks, flats)
            pipeline.order_after_current()
            tables = self._tables.get(chunks, inputs, flats, pipeline.pack)
            return Call(chunks, inputs, flats, tables, pipeline.buffers, self._num_chunks)

    def _check(self, arrays: Sequence[Any], wire_dtypes: Sequence[Any]) -> None:
        for wire in set(wire_dtypes):
            if wire.name not in kernels.DTYPE_CODES:
                names = ", ".join(kernels.DTYPE_CODES)
                raise ValueError(f"on GPUs gradients travel as {names}, not as {wire}")
            for nccl in self._watcher.nccls:
                nccl.nccl_dtype(kernels.storage_dtype(wire))
        for array in arrays:
            if array.device.id != self._device:
                raise ValueError(
                    f"a gradient lies on device {array.device.id}, and this communicator was "
                    f"first used on device {self._device}; keep to one device a rank"
                )

    def _run(self, key: Any, call: Call) -> None:
        pipeline, all_by_nccl = self._pipeline, self._links.all_by_nccl
        with self._watcher.ending(call), devices.use(self._device):
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known.add(key)
            self._watcher.start_call()
            pipeline.order_after_current()
            if all_by_nccl:
                for number in range(len(call.chunks)):
                    pipeline.begin(call, number)
                    pipeline.finish(call, number)
            else:
                self._run_through_mpi(call)
            self._num_chunks += len(call.chunks)
            over = self._watcher.end_call(pipeline.unpack, call)
            if all_by_nccl and self._watcher.in_background:
                devices.current_stream().wait_event(over)
            else:
                self._watcher.wait(partial(devices.is_done, over))

    def _run_through_mpi(self, call: Call) -> None:
        """Keep several chunks on their way between nodes; all ranks enqueue in the same order."""
        todo = iter(range(len(call.chunks)))
        # The number of each chunk on its way, and what goes on with its exchange.
        in_flight: deque[tuple[int, Iterator[int]]] = deque()
        phases: dict[int, int] = {}

        def first_is_over() -> bool:
            before = IS_OVER
            for place, (number, run) in enumerate(in_flight):
                if place == 0 or phases[number] < before:
                    phases[number] = next(run, IS_OVER)
                before = phases[number]
            return phases[in_flight[0][0]] == IS_OVER

        while True:
            while len(in_flight) < MPI_SLOTS and (number := next(todo, None)) is not None:
                in_flight.append((number, self._pipeline.begin(call, number)))
                phases[number] = WAITS
            if not in_flight:
                return
            self._watcher.wait(first_is_over)
            self._pipeline.finish(call, in_flight.popleft()[0])

    def release_local(self) -> None:
        # MPI's communicators stay; and so does memory that a device which has failed may use.
        with contextlib.suppress(Exception), devices.use(self._device):
            if self._watcher.abandon(self._pipeline.streams):
                self._release()

    def close(self) -> None:
        with self._watcher.ending(), devices.use(self._device):
            self._watcher.finish()
            for nccl in self._watcher.nccls:
                nccl.close()
        self._release()
        self._links.free()

    def _release(self) -> None:
        self._pipeline.release()
        self._tables.clear()


def _key(operand: Operand) -> Any:
    """Return what is equal on all ranks of a call, and determines how it is cut."""
    sizes = tuple([(target.size, target.dtype) for target in operand.targets])
    return sizes, tuple(operand.wire_dtypes)
