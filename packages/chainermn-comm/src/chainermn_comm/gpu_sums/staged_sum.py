"""Sums of arrays on a GPU through page-locked host memory, by an algorithm for arrays there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from mpi4py import MPI

from ..gpu import devices, staging
from ..layout import Chunk, Operand, plan_chunks
from ..messaging import Algorithm, Handshake, MakeSum, ProcessGroup
from ..sums import packed, rank_ordered
from ..topology import Topology

OPERATION = "averaging gradients on GPUs"
# Short beside the whole, so that copies and sums overlap; not measured.
CHUNK_BYTES = 4 << 20


class StagedSum(Algorithm):
    """Sums on the device that is current when this is made; each call waits for its end.

    Chunks pass through two buffers: while the host sums one, the next one comes from the
    device.
    """

    def __init__(self, group: ProcessGroup, host: MakeSum) -> None:
        """Make the algorithm for host memory, too (collective)."""
        self._group = group
        self._what = f"rank {group.rank}: {OPERATION}"
        self._device = devices.current_device()
        self._host = host(group)
        self._owned: MPI.Intracomm | None = None
        # Numbers that travel in 16 bits have an exponent for each piece: what is
        # reproducible is always cut alike.
        self._chunk_bytes = CHUNK_BYTES
        if group.settings.chunk_bytes and not group.settings.reproducible:
            self._chunk_bytes = group.settings.chunk_bytes

    @classmethod
    def between_nodes(cls, comm: MPI.Intracomm, group: ProcessGroup) -> StagedSum:
        """Sum over ``comm``, no two of whose ranks are on one node, and own that (collective)."""
        part = replace(
            group,
            comm=comm,
            handshake=Handshake(comm),
            topology=Topology(tuple(range(comm.size))),
        )
        made = cls(part, packed)
        made._what = f"rank {group.rank}: {OPERATION}"
        made._owned = comm
        return made

    def allreduce(self, operand: Operand) -> None:
        with self._group.together(OPERATION):
            run = self._prepare(operand)
        run()

    def _prepare(self, operand: Operand) -> Callable[[], None]:
        with devices.translated_errors(self._what), devices.use(self._device):
            inputs, flats = flatten(operand, self._device)
            chunks = plan_chunks(
                tuple([flat.size for flat in flats]),
                tuple([flat.dtype for flat in flats]),
                self._chunk_bytes,
            )
            batches = [_pieces_of(chunk) for chunk in chunks]
            buffers = staging.buffers_for(batches)
            copied = devices.recorded_event()  # in the stream that is current now

        def sum_chunk(batch: staging.Batch, buffer: np.ndarray) -> None:
            rows = []
            wires = []
            for piece in batch:
                dtype = flats[piece.index].dtype
                wire = operand.wire_dtypes[piece.index]
                if dtype == np.uint16:  # the bits of bfloat16
                    dtype = wire
                # As on CPUs: what is as wide as the wire dtype isn't cast.
                wires.append(dtype if wire.itemsize == dtype.itemsize else wire)
                rows.append(piece.inside(buffer).view(dtype))
            self._host.allreduce(
                Operand(rows, rows, wires, operand.divisor, operand.op)
            )

        def rest() -> None:  # the job ends where CUDA fails
            with devices.translated_errors(self._what), devices.use(self._device):
                devices.current_stream().wait_event(copied)
                staging.through_buffers(batches, buffers, sum_chunk, inputs, flats)

        return rest

    def sum_in_place(self, buffer: Any) -> None:
        """Overwrite ``buffer`` by the sum over ranks, as NCCL does (collective)."""
        wire = buffer.dtype
        if wire == np.uint16:
            wire = np.dtype("bfloat16")
        self._prepare(Operand([buffer], [buffer], [wire]))()

    def close(self) -> None:
        self._host.close()
        if self._owned is not None:
            self._owned.Free()

    def release_local(self) -> None:
        self._host.release_local()


def sum_through_host(group: ProcessGroup) -> Algorithm:
    """Sum among all ranks, without NCCL."""
    return StagedSum(group, rank_ordered if group.settings.reproducible else packed)


def flatten(operand: Operand, device: int) -> tuple[list[Any], list[Any]]:
    """Return sources and targets, 1-D and contiguous; one array where both are.

    ValueError is raised unless all of them lie on that device.
    """
    arrays: list[Any] = [*operand.sources, *operand.targets]
    for array in arrays:
        check_device(array, device)
    flats = [target.reshape(-1) for target in operand.targets]
    inputs = []
    for flat, source, target in zip(
        flats, operand.sources, operand.targets, strict=True
    ):
        if source is target:
            inputs.append(flat)
        else:
            inputs.append(staging.flat(source))
    return inputs, flats


def check_device(array: Any, device: int) -> None:
    """Raise ValueError unless an array on a GPU lies on that device."""
    if array.device.id != device:
        raise ValueError(
            f"an array lies on device {array.device.id}, and this communicator was first "
            f"used on device {device}; keep to one device a rank"
        )


def _pieces_of(chunk: Chunk) -> list[staging.Piece]:
    """Return a chunk's segments as bytes of the arrays, one after the other in a buffer."""
    pieces = []
    filled = 0
    itemsize = chunk.dtype.itemsize
    for index, start, stop in chunk.segments:
        pieces.append(staging.Piece(index, start * itemsize, stop * itemsize, filled))
        filled += (stop - start) * itemsize
    return pieces
