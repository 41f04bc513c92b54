"""Means of gradients on GPUs by NCCL, in each node and between nodes.

A call only enqueues its work on the current stream: a kernel packs a chunk, NCCL sums it,
and another kernel unpacks it; then comes the next chunk. A :class:`Watcher` looks after
the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..gpu import devices, kernels
from ..layout import Chunk, Operand, plan_chunks
from ..messaging import Algorithm, ProcessGroup
from .nccl_groups import NcclGroups
from .staged_sum import OPERATION, flattened
from .watcher import Watcher

# NCCL needs tens of megabytes to reach its bandwidth. The size was never measured,
# since that needs several GPUs.
CHUNK_BYTES = 32 << 20


@dataclass
class PreparedCall:
    """The memory and the plan of one call, which must live until its work is over."""

    chunks: Sequence[Chunk]
    operand: Operand  # with 1-D arrays
    # (2, rows, 3) int64 on the device: a table for packing and a table for unpacking,
    # each with the rows of all chunks, one after the other.
    tables: Any
    buffer: Any  # on the device, for one chunk at a time


class NcclSum(Algorithm):
    """Means over a group's ranks, on the device that is current when this is made."""

    def __init__(
        self, group: ProcessGroup, groups: NcclGroups, watcher: Watcher
    ) -> None:
        """Sum with ``groups``, whose NCCL the watcher owns (not collective)."""
        self._group = group
        self._groups = groups
        self._watcher = watcher
        self._chunk_bytes = group.settings.chunk_bytes or CHUNK_BYTES
        # Layouts that fit on all ranks: sizes and dtypes of the calls so far.
        self._known: set[Any] = set()
        self._buffer = devices.empty(0)

    def allreduce(self, operand: Operand) -> None:
        assert operand.op is np.add, "gradients are summed"
        sizes = tuple([(each.size, each.dtype) for each in operand.targets])
        layout = sizes, tuple(operand.wire_dtypes)
        if layout in self._known:
            call = self._prepare(operand)
        else:  # all ranks take this branch
            with self._group.together(OPERATION):
                call = self._prepare(operand)
            self._known.add(layout)
        with self._watcher.enqueuing(OPERATION, call):
            row = 0
            for chunk in call.chunks:
                self._sum_chunk(call, chunk, row)
                row += kernels.rows_of(chunk)

    def _prepare(self, operand: Operand) -> PreparedCall:
        """Do the part of a call that needs no other rank, and writes to no target."""
        with self._watcher.using_device(OPERATION):
            flat = flattened(operand, self._watcher.device)
            sizes = tuple([target.size for target in flat.targets])
            chunks = plan_chunks(sizes, tuple(operand.wire_dtypes), self._chunk_bytes)
            nbytes = max([chunk.nbytes for chunk in chunks], default=0)
            # A smaller buffer that is replaced lives on until the calls before have ended.
            if self._buffer.nbytes < nbytes:
                self._buffer = devices.empty(nbytes)
            tables = [
                kernels.segment_table(chunks, flats)
                for flats in (flat.sources, flat.targets)
            ]
            return PreparedCall(
                chunks=chunks,
                operand=flat,
                tables=devices.from_host(np.stack(tables)),
                buffer=self._buffer,
            )

    def _sum_chunk(self, call: PreparedCall, chunk: Chunk, row: int) -> None:
        dtype = chunk.dtype
        if dtype.name == "bfloat16":
            dtype = np.dtype(np.uint16)  # its bits, because not every CuPy has bfloat16
        buffer = call.buffer[: chunk.nbytes].view(dtype)
        to_pack = call.tables[0, row:]
        to_unpack = call.tables[1, row:]
        kernels.launch("pack", chunk, to_pack, buffer, call.operand.divisor)
        self._groups.sum_in_place(buffer)
        kernels.launch("unpack", chunk, to_unpack, buffer)

    def close(self) -> None:
        self._groups.close()
