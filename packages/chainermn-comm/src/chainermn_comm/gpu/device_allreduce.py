"""Means of gradients on GPUs by NCCL, in each node and between nodes.

A call only enqueues the work of a :class:`ChunkPipeline`, and the current stream waits for its end;
a :class:`Watcher` looks after it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .. import devices
from ..allreduce import Algorithm, Operand
from ..arithmetic import plan_chunks
from ..messaging import ProcessGroup
from . import kernels
from .communicators import Communicators
from .pipeline import ChunkPipeline, PreparedCall
from .staged import OPERATION, flatten
from .watcher import Watcher

# NCCL wants tens of megabytes to reach its bandwidth; not measured, as that takes several GPUs.
CHUNK_BYTES = 32 << 20
# Calls whose shapes are known to fit on all ranks.
MOST_KNOWN = 4096


class DeviceAllreduce(Algorithm):
    """Means over a group's ranks, on the device that is current when this is made."""

    def __init__(self, group: ProcessGroup, communicators: Communicators) -> None:
        """Own the communicators, which are connected (collective)."""
        self._group, self._communicators = group, communicators
        self._pipeline = group.run_or_raise(
            OPERATION, lambda: ChunkPipeline(communicators, group.size, group.settings.reduce_dtype)
        )
        self._chunk_bytes = group.settings.chunk_bytes or CHUNK_BYTES
        self._known: set[Any] = set()
        self._watcher = Watcher(group, OPERATION, communicators.nccls, self._pipeline)

    def allreduce(self, operand: Operand) -> None:
        """Write the mean over ranks of each source into its target (collective).

        Sources and targets are CuPy arrays of this algorithm's device, in the order of the current
        stream, and this may return before that is done. Where NCCL or CUDA fails, then or later,
        the job ends.
        """
        prepare = partial(self.prepare, operand)
        if _key(operand) not in self._known:
            run = self._group.run_or_raise(OPERATION, prepare)
        else:
            with self._watcher.ending():
                run = prepare()
        run()

    def prepare(self, operand: Operand) -> Callable[[], None]:
        with devices.translated_errors(self._watcher.what), devices.use(self._watcher.device):
            with self._watcher.ending():
                self._watcher.poll()
            self._check_dtypes(operand)
            inputs, flats = flatten(operand, self._watcher.device)
            sizes = tuple([flat.size for flat in flats])
            chunks = plan_chunks(sizes, tuple(operand.wire_dtypes), self._chunk_bytes)
            call = self._pipeline.prepare(chunks, inputs, flats)
        return partial(self._run, _key(operand), call)

    def _check_dtypes(self, operand: Operand) -> None:
        for wire in set(operand.wire_dtypes):
            if wire.name not in kernels.DTYPE_CODES:
                names = ", ".join(kernels.DTYPE_CODES)
                raise ValueError(f"on GPUs gradients travel as {names}, not as {wire}")
            for nccl in self._communicators.nccls:
                nccl.nccl_dtype(kernels.storage_dtype(wire))

    def _run(self, key: Any, call: PreparedCall) -> None:
        with self._watcher.enqueuing(call, self._pipeline.streams[-1]):
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known.add(key)
            self._pipeline.run(call)

    def release_local(self) -> None:
        if self._watcher.abandon(self._pipeline.streams):
            self._pipeline.release()
            self._communicators.release_local()

    def close(self) -> None:
        self._watcher.finish(self._communicators.close)
        self._pipeline.release()


def _key(operand: Operand) -> Any:
    """Return what is equal on all ranks of a call, and determines how it is cut."""
    sizes = tuple([(target.size, target.dtype) for target in operand.targets])
    return sizes, tuple(operand.wire_dtypes)
