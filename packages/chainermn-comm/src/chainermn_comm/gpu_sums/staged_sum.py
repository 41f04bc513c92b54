"""Sums of arrays on a GPU through page-locked host memory, by an algorithm for arrays there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..gpu import devices, staging
from ..layout import Chunk, Operand, plan_chunks
from ..messaging import Algorithm, MakeSum, ProcessGroup
from ..sums import packed, rank_ordered

OPERATION = "averaging gradients on GPUs"
# Chunks are much smaller than a model, so that copies and sums overlap. The size was
# never measured.
CHUNK_BYTES = 4 << 20


class StagedSum(Algorithm):
    """Sums on the device that is current when this is made; each call waits for its end.

    Chunks pass through two buffers: while the host sums one, the next one comes from the
    device.
    """

    def __init__(self, group: ProcessGroup, host: MakeSum) -> None:
        """Make the algorithm for host memory, too (collective)."""
        self._group = group
        self._device = devices.current_device()
        self._host = host(group)
        # Each chunk of 16-bit numbers has an exponent, so reproducible sums must always have
        # the same chunks.
        self._chunk_bytes = CHUNK_BYTES
        if group.settings.chunk_bytes and not group.settings.reproducible:
            self._chunk_bytes = group.settings.chunk_bytes

    def allreduce(self, operand: Operand) -> None:
        with self._group.together(OPERATION):
            run = self._prepare(operand)
        run()

    def _prepare(self, operand: Operand) -> Callable[[], None]:
        """Do the part of a call that needs no other rank, and return the rest."""
        with devices.use(self._device):
            flat = flattened(operand, self._device)
            chunks = plan_chunks(
                tuple([target.size for target in flat.targets]),
                tuple([target.dtype for target in flat.targets]),
                self._chunk_bytes,
            )
            buffers = staging.buffers_for(chunks)

        def sum_chunk(chunk: Chunk, buffer: np.ndarray) -> None:
            rows = []
            wires = []
            for index, _, place in chunk.segments:
                part = buffer[place]
                wire = operand.wire_dtypes[index]
                if part.dtype == np.uint16:  # the bits of bfloat16
                    part = part.view(wire)
                # As on CPUs: an array as wide as the wire dtype isn't cast.
                if wire.itemsize == part.dtype.itemsize:
                    wire = part.dtype
                rows.append(part)
                wires.append(wire)
            self._host.allreduce(
                Operand(rows, rows, wires, operand.divisor, operand.op)
            )

        def rest() -> None:  # if CUDA fails, the job ends
            with devices.use(self._device):
                staging.through_buffers(
                    chunks, buffers, sum_chunk, flat.sources, flat.targets
                )

        return rest

    def sum_in_place(self, buffer: Any) -> None:
        """Overwrite ``buffer`` by the sum over ranks, as NCCL does (collective)."""
        wire = buffer.dtype
        if wire == np.uint16:
            wire = np.dtype("bfloat16")
        self._prepare(Operand([buffer], [buffer], [wire]))()

    def close(self) -> None:
        self._host.close()

    def release_local(self) -> None:
        self._host.release_local()


def sum_through_host(group: ProcessGroup) -> Algorithm:
    """Sum among all ranks, without NCCL."""
    return StagedSum(group, rank_ordered if group.settings.reproducible else packed)


def flattened(operand: Operand, device: int) -> Operand:
    """Return the operand with 1-D arrays; ValueError unless all of them lie on that device."""
    for array in (*operand.sources, *operand.targets):
        check_device(array, device)
    return operand.flattened()


def check_device(array: Any, device: int) -> None:
    """Raise ValueError unless an array on a GPU lies on that device."""
    if array.device.id != device:
        raise ValueError(
            f"an array lies on device {array.device.id}, and this communicator was first "
            f"used on device {device}; keep to one device a rank"
        )
