"""Sums of arrays on a GPU through page-locked host memory, by an algorithm for arrays there.

While a chunk is summed, the one after comes from the device, and the one before goes
back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from .. import devices, staging
from ..layout import Chunk, Operand, plan_chunks
from ..messaging import Algorithm, Handshake, MakeSum, ProcessGroup
from ..sums import packed
from ..topology import Topology

OPERATION = "averaging gradients on GPUs"
# Short beside the whole, so that copies and sums overlap; not measured.
CHUNK_BYTES = 4 << 20
SLOTS = 3  # chunks that are under way


class StagedAllreduce(Algorithm):
    """Sums on the device that is current when this is made; each call waits for its end."""

    def __init__(
        self, group: ProcessGroup, host: MakeSum, rank: int | None = None
    ) -> None:
        """Make the algorithm for host memory, too (collective); errors name this ``rank``."""
        self._group = group
        self._what = f"rank {group.rank if rank is None else rank}: {OPERATION}"
        with group.together(OPERATION):
            self._device = self._make()
        self._host = host(group)
        # Numbers that travel in 16 bits have an exponent for each piece: what is
        # reproducible is always cut alike.
        settings = group.settings
        self._chunk_bytes = (
            not settings.reproducible and settings.chunk_bytes
        ) or CHUNK_BYTES
        self._buffers = [np.empty(0, np.uint8)] * SLOTS

    def _make(self) -> int:
        self._down, self._up = devices.new_stream(), devices.new_stream()
        self._arrived, self._returned = (
            [devices.new_event() for _ in range(SLOTS)] for _ in "au"
        )
        return devices.current_device()

    def allreduce(self, operand: Operand) -> None:
        with self._group.together(OPERATION):
            run = self.prepare(operand)
        run()

    def prepare(self, operand: Operand) -> Callable[[], None]:
        with devices.translated_errors(self._what), devices.use(self._device):
            inputs, flats = flatten(operand, self._device)
            sizes, dtypes = (
                tuple([f.size for f in flats]),
                tuple([f.dtype for f in flats]),
            )
            chunks = plan_chunks(sizes, dtypes, self._chunk_bytes)
            nbytes = max([chunk.nbytes for chunk in chunks], default=0)
            if self._buffers[0].nbytes < nbytes:
                self._buffers = [devices.pinned(nbytes) for _ in self._buffers]
            copied = devices.recorded_event()  # in the stream that is current now

        def rest() -> None:  # the job ends where CUDA fails
            with devices.translated_errors(self._what), devices.use(self._device):
                begun = devices.recorded_event()
                for stream in (self._down, self._up):
                    stream.wait_event(copied)
                    stream.wait_event(begun)
                for number in range(len(chunks) + 1):
                    if number < len(chunks):
                        slot = number % SLOTS
                        self._down.wait_event(self._returned[slot])
                        for array, part in self._parts(chunks[number], slot, inputs):
                            devices.copy(array, part, self._down)
                        self._arrived[slot].record(self._down)
                    if number:
                        self._sum(
                            operand, chunks[number - 1], (number - 1) % SLOTS, flats
                        )
                staging.wait([self._returned[(len(chunks) - 1) % SLOTS]])

        return rest

    def _sum(self, operand: Operand, chunk: Chunk, slot: int, flats: list[Any]) -> None:
        staging.wait([self._arrived[slot]])
        parts = self._parts(chunk, slot, flats)
        wires = [operand.wire_dtypes[index] for index, _, _ in chunk.segments]
        # As on CPUs: what is as wide as the wire dtype isn't cast.
        if chunk.dtype != np.uint16:
            own = chunk.dtype
            wires = [own if wire.itemsize == own.itemsize else wire for wire in wires]
        # An array of the bits of bfloat16 is no gradient, but a sum of
        # :class:`StagedSum`.
        dtype = wires[0] if chunk.dtype == np.uint16 else chunk.dtype
        rows = [part.view(dtype) for _, part in parts]
        self._host.allreduce(Operand(rows, rows, wires, operand.divisor, operand.op))
        for array, part in parts:
            devices.copy(part, array, self._up)
        self._returned[slot].record(self._up)

    def _parts(
        self, chunk: Chunk, slot: int, flats: list[Any]
    ) -> list[tuple[Any, np.ndarray]]:
        """Return each segment of a chunk on the device, and its bytes in the slot's buffer."""
        arrays = [flats[index][start:stop] for index, start, stop in chunk.segments]
        ends = accumulate([array.nbytes for array in arrays], initial=0)
        buffer = self._buffers[slot]
        return [
            (a, buffer[i:j]) for a, (i, j) in zip(arrays, pairwise(ends), strict=True)
        ]

    def close(self) -> None:
        self._buffers = []
        self._host.close()

    def release_local(self) -> None:
        self._buffers = []
        self._host.release_local()


class StagedSum(StagedAllreduce):
    """Sums over ranks as NCCL's communicator takes them, too; it waits for their end."""

    def __init__(self, group: ProcessGroup, comm: MPI.Intracomm) -> None:
        """Sum over those of the group's ranks that are in ``comm``, and own that (collective).

        No two of them are on one node.
        """
        self._comm = comm
        apart = Topology(tuple(range(comm.size)))
        part = replace(group, comm=comm, handshake=Handshake(comm), topology=apart)
        super().__init__(part, packed, group.rank)

    def sum_in_place(self, buffer: Any, stream: Any) -> None:
        """Overwrite ``buffer`` by the sum over ranks, in the stream's order (collective)."""
        wire = np.dtype("bfloat16") if buffer.dtype == np.uint16 else buffer.dtype
        with stream:
            self.prepare(Operand([buffer], [buffer], [wire]))()

    def close(self) -> None:
        super().close()
        self._comm.Free()


def flatten(operand: Operand, device: int) -> tuple[list[Any], list[Any]]:
    """Return sources and targets, 1-D and contiguous; one array where both are.

    ValueError is raised unless all of them lie on that device.
    """
    arrays: list[Any] = [*operand.sources, *operand.targets]
    for array in arrays:
        if array.device.id != device:
            raise ValueError(
                f"a gradient lies on device {array.device.id}, and this communicator was "
                f"first used on device {device}; keep to one device a rank"
            )
    flats = [target.reshape(-1) for target in operand.targets]
    inputs = [
        flat if source is target else devices.c_ordered(source).reshape(-1)
        for flat, source, target in zip(flats, *operand[:2], strict=True)
    ]
    return inputs, flats
