"""Takes the mean of a stream of arrays over ranks, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .transport import Transport

# A batched chunk: long enough that MPI's latency doesn't count, short enough to stay in cache.
CHUNK_BYTES = 1 << 20

# How the mean of a list of arrays is taken: from sources, targets, transport and wire dtypes.
Mean = Callable[[Sequence[np.ndarray], Sequence[np.ndarray], Transport, Sequence[np.dtype]], None]

# A part of a chunk: index of the array, and the elements from start to stop of it, flattened.
Part = tuple[int, int, int]


def mean_each(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    transport: Transport,
    wires: Sequence[np.dtype],
) -> None:
    """Write the mean over ranks of each source into its target, array by array (collective).

    Args:
        sources: arrays of any layout; equal shapes and dtypes on all ranks.
        targets: C-contiguous arrays of the same shapes and dtypes; a target may be its source.
        transport: among the ranks that take part.
        wires: the dtype in which each array travels.
    """
    for source, target, wire in zip(sources, targets, wires, strict=True):
        flat = target.reshape(-1)
        if wire == target.dtype:
            if target is not source:
                target[...] = source
            transport.allreduce(flat, transport.size)
        else:
            with np.errstate(over="ignore"):
                buffer = source.astype(wire, order="C").reshape(-1)
            flat[...] = transport.allreduce(buffer, transport.size)


def mean_batched(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    transport: Transport,
    wires: Sequence[np.dtype],
) -> None:
    """The same as :func:`mean_each`, with small arrays packed together into chunks.

    Beside the model it needs one chunk, and a copy of one source that is not C-contiguous.
    """
    flat_targets = [target.reshape(-1) for target in targets]
    flat_sources = [
        flat if source is target else source.reshape(-1)
        for source, target, flat in zip(sources, targets, flat_targets, strict=True)
    ]
    for wire in dict.fromkeys(wires):
        members = [index for index, other in enumerate(wires) if other == wire]
        buffer = np.empty(CHUNK_BYTES // wire.itemsize, wire)
        for chunk in chunks(members, [target.size for target in flat_targets], buffer.size):
            _mean_chunk(chunk, flat_sources, flat_targets, buffer, transport)


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
    with np.errstate(over="ignore"):
        for index, start, stop in chunk:
            end = filled + stop - start
            buffer[filled:end] = sources[index][start:stop]
            filled = end
    mean = transport.allreduce(buffer[:filled], transport.size)
    filled = 0
    for index, start, stop in chunk:
        end = filled + stop - start
        targets[index][start:stop] = mean[filled:end]
        filled = end
