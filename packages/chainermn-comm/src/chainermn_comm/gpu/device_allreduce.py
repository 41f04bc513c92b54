"""Means of gradients on GPUs by NCCL, in each node and between nodes.

A call only enqueues the work of a :class:`Pipeline`, and the current stream waits for its end; a
:class:`Watcher` looks after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .. import devices
from ..allreduce import Algorithm, Operand
from ..arithmetic import plan_chunks
from ..messaging import ProcessGroup
from ..topology import Topology
from . import kernels
from .links import Links
from .pipeline import Call, Pipeline
from .staged import OPERATION, StagedSum
from .tables import TableCache
from .watcher import Watcher

# NCCL wants tens of megabytes to reach its bandwidth; not measured, as that takes several GPUs.
CHUNK_BYTES = 32 << 20
# Calls whose shapes are known to fit on all ranks.
MOST_KNOWN = 4096


class DeviceAllreduce(Algorithm):
    """Means over one topology, on the device that is current when this is made."""

    def __init__(self, group: ProcessGroup, topology: Topology, leaders: int, links: Links) -> None:
        """Own the links, which :func:`connect_ranks` made (collective)."""
        self._group = group
        with group.in_step(OPERATION):
            self._device, self._pipeline = group.run_on_all_ranks(
                OPERATION, lambda: (devices.current_device(), Pipeline())
            )
        self._watcher = Watcher(group, self._device, self._pipeline, OPERATION)
        index = topology.intra_rank(group.rank)
        self._pipeline.connect(links, group.size, leaders, index, group.reduce_dtype)
        self._chunk_bytes = group.chunk_bytes or CHUNK_BYTES
        self._num_chunks = 0  # so far
        self._known: set[Any] = set()
        self._links, self._watcher.nccls = links, links.nccls
        self._tables = TableCache(partial(self._watcher.add, self._pipeline.unpack))

    def allreduce(self, operand: Operand) -> None:
        """Write the mean over ranks of each source into its target (collective).

        Sources and targets are CuPy arrays of this algorithm's device, in the order of the current
        stream, and this may return before that is done. Where NCCL or CUDA fails, then or later,
        the job ends.
        """
        prepare = partial(self._prepare, operand)
        key = _key(operand)
        if key not in self._known:
            call = self._group.run_on_all_ranks(OPERATION, prepare)
        else:
            with self._watcher.ending():
                call = prepare()
        self._run(key, call)

    def prepare(self, operand: Operand) -> Callable[[], None]:
        with devices.translated_errors(self._watcher.told):
            call = self._prepare(operand)
        return partial(self._run, _key(operand), call)

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
        devices.require_device(arrays, self._device)

    def _run(self, key: Any, call: Call) -> None:
        pipeline = self._pipeline
        with self._watcher.ending(call), devices.use(self._device):
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known.add(key)
            self._watcher.start_call()
            pipeline.order_after_current()
            for number in range(len(call.chunks)):
                pipeline.run(call, number)
            self._num_chunks += len(call.chunks)
            over = self._watcher.end_call(pipeline.unpack, call)
            if self._watcher.has_thread:
                devices.current_stream().wait_event(over)
            else:
                self._watcher.wait(partial(devices.is_done, over))

    def release_local(self) -> None:
        # Memory that a device which has failed may use stays.
        with contextlib.suppress(Exception), devices.use(self._device):
            if self._watcher.abandon(self._pipeline.streams):
                self._release()
                if isinstance(self._links.inter, StagedSum):
                    self._links.inter.release_local()

    def close(self) -> None:
        with self._watcher.ending(), devices.use(self._device):
            self._watcher.finish()
            for link in (self._links.node, self._links.inter):
                if link is not None:
                    link.close()
        self._release()

    def _release(self) -> None:
        self._pipeline.release()
        self._tables.clear()


def _key(operand: Operand) -> Any:
    """Return what is equal on all ranks of a call, and determines how it is cut."""
    sizes = tuple([(target.size, target.dtype) for target in operand.targets])
    return sizes, tuple(operand.wire_dtypes)
