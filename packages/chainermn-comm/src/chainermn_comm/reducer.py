"""Takes the mean of a stream of arrays over ranks, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .transport import Transport

# A packed chunk: long enough that MPI's latency doesn't count, short enough to stay in cache.
CHUNK_BYTES = 1 << 20

# A part of a chunk: index of the array, and the elements from start to stop of it, flattened.
Part = tuple[int, int, int]


def mean(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    wires: Sequence[np.dtype],
    transport: Transport,
    batched: bool,
) -> None:
    """Write the mean over ranks of each source into its target (collective).

    Which arrays travel together follows from what ranks agree on (sizes, dtypes, ``wires``,
    ``batched``), never from how an array happens to lie in one rank's memory. Beside sources
    and targets this takes one chunk, and a copy of one source that is not C-contiguous.

    Args:
        sources: arrays of any layout; equal shapes and dtypes on all ranks.
        targets: C-contiguous arrays of the same shapes and dtypes; a target may be its source.
        wires: the dtype in which each array travels.
        transport: among the ranks that take part.
        batched: whether small arrays are packed together.
    """
    flats = [target.reshape(-1) for target in targets]
    packed: dict[np.dtype, list[int]] = {}
    with np.errstate(over="raise", invalid="ignore"):
        for index, (wire, flat) in enumerate(zip(wires, flats, strict=True)):
            if wire != flat.dtype or (batched and flat.nbytes < CHUNK_BYTES):
                packed.setdefault(wire, []).append(index)
                continue
            if targets[index] is not sources[index]:
                targets[index][...] = sources[index]
            transport.allreduce(flat, transport.size)
        for wire, members in packed.items():
            buffer = np.empty(CHUNK_BYTES // wire.itemsize, wire)
            sizes = [flat.size for flat in flats]
            for group in [members] if batched else [[member] for member in members]:
                for chunk in chunks(group, sizes, buffer.size):
                    _mean_chunk(chunk, sources, flats, buffer, transport)


def chunks(members: Sequence[int], sizes: Sequence[int], limit: int) -> Iterator[list[Part]]:
    """Cut the members, laid end to end, into chunks of ``limit`` elements; the last is shorter."""
    chunk: list[Part] = []
    room = limit
    for index in members:
        start = 0
        while start < sizes[index]:
            stop = min(sizes[index], start + room)
            chunk.append((index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield chunk
                chunk, room = [], limit
    if chunk:
        yield chunk


def _mean_chunk(
    chunk: list[Part],
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    buffer: np.ndarray,
    transport: Transport,
) -> None:
    filled = 0
    with np.errstate(over="ignore"):  # casting to a narrow wire dtype may overflow
        for index, start, stop in chunk:
            end = filled + stop - start
            buffer[filled:end] = sources[index].reshape(-1)[start:stop]
            filled = end
    mean = transport.allreduce(buffer[:filled], transport.size)
    filled = 0
    for index, start, stop in chunk:
        end = filled + stop - start
        targets[index][start:stop] = mean[filled:end]
        filled = end
