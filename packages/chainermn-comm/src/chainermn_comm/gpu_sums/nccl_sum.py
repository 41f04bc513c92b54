"""Means of gradients on GPUs by NCCL, in each node and between nodes.

A call only enqueues its work on the current stream: a kernel packs a chunk, NCCL sums it,
and another kernel unpacks it; then comes the next chunk. A gradient that needs no cast
and no packing is summed where it lies. A :class:`Watcher` looks after the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from ..gpu import devices, kernels
from ..layout import Chunk, Operand, plan_chunks
from ..messaging import Algorithm, ProcessGroup
from .nccl_groups import NcclGroups
from .staged_sum import OPERATION, flatten
from .watcher import Watcher

# NCCL wants tens of megabytes to reach its bandwidth; not measured, as that takes
# several GPUs.
CHUNK_BYTES = 32 << 20
# Calls whose layouts are known to fit on all ranks.
MOST_KNOWN = 4096


@dataclass
class PreparedCall:
    """What one call needs; all of it must live until its work is over."""

    chunks: Sequence[Chunk]
    inputs: list[Any]  # what is read, 1-D and contiguous
    # What is written, likewise; the same arrays where that is the same memory.
    outputs: list[Any]
    divisor: int
    # What the kernels walk, all chunks' one after the other: pinned, and on the device.
    host_tables: np.ndarray
    tables: Any
    buffer: Any  # on the device, for one chunk at a time
    ready: Any  # the event after which the inputs are complete


class NcclSum(Algorithm):
    """Means over a group's ranks, on the device that is current when this is made."""

    def __init__(
        self, group: ProcessGroup, groups: NcclGroups, watcher: Watcher
    ) -> None:
        """Own the connections (not collective)."""
        self._group = group
        self._groups = groups
        self._watcher = watcher
        self._chunk_bytes = group.settings.chunk_bytes or CHUNK_BYTES
        self._known: set[Any] = set()
        self._buffer = devices.empty(0)

    def allreduce(self, operand: Operand) -> None:
        sizes = tuple([(each.size, each.dtype) for each in operand.targets])
        layout = sizes, tuple(operand.wire_dtypes)
        if layout in self._known:
            run = self._prepare(operand)
        else:  # the same on all ranks
            with self._group.together(OPERATION):
                run = self._prepare(operand)
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known.add(layout)
        run()

    def _prepare(self, operand: Operand) -> Callable[[], None]:
        assert operand.op is np.add, "gradients are summed"
        with self._watcher.using_device(OPERATION):
            inputs, outputs = flatten(operand, self._watcher.device)
            sizes = tuple([output.size for output in outputs])
            chunks = plan_chunks(sizes, tuple(operand.wire_dtypes), self._chunk_bytes)
            packed = [chunk for chunk in chunks if self._place(chunk, outputs) is None]
            nbytes = max(map(self._padded_bytes, packed), default=0)
            # A smaller buffer that is replaced lives on until the calls before have ended.
            if self._buffer.nbytes < nbytes:
                self._buffer = devices.empty(nbytes)
            rows = [
                kernels.segment_table(chunks, kernels.places(flats))
                for flats in (inputs, outputs)
            ]
            host_tables = devices.pinned(sum([each.nbytes for each in rows]))
            np.concatenate(rows, out=host_tables.view(np.int64).reshape(-1, 3))
            call = PreparedCall(
                chunks=chunks,
                inputs=inputs,
                outputs=outputs,
                divisor=operand.divisor,
                host_tables=host_tables,
                tables=devices.empty(host_tables.nbytes),
                buffer=self._buffer,
                ready=devices.recorded_event(),
            )
        return partial(self._run, call)

    def _run(self, call: PreparedCall) -> None:
        """Enqueue everything (collective)."""
        with self._watcher.enqueuing(OPERATION, call):
            stream = devices.current_stream()
            stream.wait_event(call.ready)
            devices.copy(call.host_tables, call.tables, stream)
            lengths = [len(chunk.segments) + 1 for chunk in call.chunks]
            starts = list(accumulate(lengths, initial=0))
            to_unpack = call.tables[starts[-1] * kernels.ROW_BYTES :]
            for chunk, start in zip(call.chunks, starts[:-1], strict=True):
                first = start * kernels.ROW_BYTES
                self._sum_chunk(call, chunk, call.tables[first:], to_unpack[first:])

    def _sum_chunk(
        self, call: PreparedCall, chunk: Chunk, to_pack: Any, to_unpack: Any
    ) -> None:
        count = len(chunk.segments)
        index, _, _ = chunk.segments[0]
        summed = self._place(chunk, call.outputs)
        in_place = summed is not None
        if not in_place:
            dtype = chunk.dtype
            if dtype.name == "bfloat16":
                dtype = np.dtype(np.uint16)  # its bits: not every CuPy has bfloat16
            summed = call.buffer[: self._padded_bytes(chunk)].view(dtype)
        is_ready = in_place and call.inputs[index] is call.outputs[index]
        if not is_ready or call.divisor > 1:
            kernels.launch(
                "pack", chunk.dtype, to_pack, count, summed, chunk.size, call.divisor
            )
        self._groups.sum_in_place(summed, chunk.size)
        if not in_place:
            kernels.launch("unpack", chunk.dtype, to_unpack, count, summed, chunk.size)

    def _place(self, chunk: Chunk, outputs: list[Any]) -> Any | None:
        """Return the memory in which a chunk is summed; None if it has to be packed."""
        index, start, stop = chunk.segments[0]
        if len(chunk.segments) > 1 or outputs[index].dtype != chunk.dtype:
            return None
        if chunk.size % self._groups.shards > 0:  # it is padded
            return None
        return outputs[index][start:stop]

    def _padded_bytes(self, chunk: Chunk) -> int:
        """Return the bytes of a buffer with equal shards."""
        shards = self._groups.shards
        return -(-chunk.size // shards) * shards * chunk.dtype.itemsize

    def close(self) -> None:
        self._watcher.wait()
        self._groups.close()

    def release_local(self) -> None:
        self._groups.release_local()
