"""Chunks of gradients: how arrays are divided into chunks, packed into buffers and unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..numbers import FLOAT16, FLOAT32, cast_into

# Arrays of at most a chunk's bytes divided by this are packed together: three quarters
# of each such chunk are full then, and the copies that packing takes are few bytes of
# most models.
SMALL_FRACTION = 4
CACHE_LINE = 64


@dataclass(frozen=True)
class Chunk:
    """Segments of gradients that travel together."""

    dtype: np.dtype  # in which they travel
    # (index of the array, start, stop) of each segment of a flattened array; if there
    # are several, each is a whole array.
    segments: tuple[tuple[int, int, int], ...]
    size: int  # number of elements

    @property
    def nbytes(self) -> int:
        """Number of bytes that travel."""
        return self.size * self.dtype.itemsize

    def pack(self, flats: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Write the segments of ``flats`` (1-D each) into ``out`` (size,), cast to its dtype."""
        pieces = [flats[index] for index, _, _ in self.segments]
        if len(pieces) == 1:
            _, start, stop = self.segments[0]
            pieces = [pieces[0][start:stop]]
        try:  # looking at each dtype before takes longer
            np.concatenate(pieces, out=out, casting="no")
        except TypeError:
            _pack_cast(pieces, out)

    def unpack(self, buffer: np.ndarray, flats: Sequence[np.ndarray]) -> None:
        """Write ``buffer`` (size,) back into the segments of ``flats``."""
        if len(self.segments) == 1:
            index, start, stop = self.segments[0]
            cast_into(buffer, flats[index][start:stop])
            return
        if buffer.dtype == FLOAT16 and any(
            flats[index].dtype != FLOAT16 for index, _, _ in self.segments
        ):
            # All at once, since the segments may be many and small.
            narrow, buffer = buffer, np.empty(buffer.size, FLOAT32)
            cast_into(narrow, buffer)
        filled = 0
        for index, _, size in self.segments:
            end = filled + size
            flats[index][...] = buffer[filled:end]
            filled = end


def _pack_cast(pieces: Sequence[np.ndarray], out: np.ndarray) -> None:
    dtypes = {piece.dtype for piece in pieces}
    with np.errstate(all="ignore"):  # in a narrow wire dtype
        if len(pieces) == 1:
            cast_into(pieces[0], out)
        elif out.dtype == FLOAT16 and dtypes == {FLOAT32}:
            cast_into(np.concatenate(pieces), out)
        else:
            np.concatenate(pieces, out=out, casting="unsafe")


@lru_cache(maxsize=8)
def plan_chunks(
    sizes: tuple[int, ...], dtypes: tuple[np.dtype, ...], chunk_bytes: int
) -> list[Chunk]:
    """Divide arrays of ``sizes`` elements into chunks of at most ``chunk_bytes``.

    A large array is divided into equal chunks of its own, so that they can be summed in
    its own memory; only small ones are packed together, whole. Chunks have one element
    at least. ``dtypes`` are those in which the arrays travel; chunks are in their
    order.
    """
    chunks: list[Chunk] = []
    for dtype in dict.fromkeys(dtypes):
        limit = max(1, chunk_bytes // dtype.itemsize)
        segments: list[tuple[int, int, int]] = []
        filled = 0
        for index, size in enumerate(sizes):
            if dtypes[index] != dtype or size == 0:
                continue
            if size * SMALL_FRACTION > limit:
                # Equal chunks of whole cache lines; the last may be shorter.
                line = max(1, CACHE_LINE // dtype.itemsize)
                even = -(-size // -(-size // limit))
                step = min(limit, -(-even // line) * line)
                for start in range(0, size, step):
                    stop = min(size, start + step)
                    chunks.append(Chunk(dtype, ((index, start, stop),), stop - start))
                continue
            if filled + size > limit:
                chunks.append(Chunk(dtype, tuple(segments), filled))
                segments, filled = [], 0
            segments.append((index, 0, size))
            filled += size
        if segments:
            chunks.append(Chunk(dtype, tuple(segments), filled))
    return chunks


def shard_slice(size: int, shards: int, index: int) -> slice:
    """Return the index-th of nearly equal slices of ``range(size)``."""
    return slice(size * index // shards, size * (index + 1) // shards)
