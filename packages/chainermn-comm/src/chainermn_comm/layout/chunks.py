"""Chunks of gradients: how arrays are divided into chunks, packed into buffers and unpacked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..numbers import FLOAT16, cast_into
from .operand import Operand

# Arrays are packed together if they have at most a chunk's bytes divided by this
# number. So such a chunk is at least three quarters full, and most models have few
# bytes to copy.
SMALL_FRACTION = 4
CACHE_LINE = 64


class Segment(NamedTuple):
    """Elements of a flattened array."""

    array: int  # its number among the arrays that are summed together
    span: slice  # of the array
    place: slice  # of the chunk


@dataclass(frozen=True)
class Chunk:
    """Segments of gradients that travel together: a part of one array, or some whole arrays."""

    dtype: np.dtype  # the dtype in which they travel
    segments: tuple[Segment, ...]  # each is a whole array if there are several
    size: int  # number of elements

    @property
    def nbytes(self) -> int:
        """Number of bytes that travel."""
        return self.size * self.dtype.itemsize

    def in_place(self, operand: Operand) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the source and the target if they can travel as they are, otherwise None."""
        index, span, _ = self.segments[0]
        source = operand.sources[index]
        target = operand.targets[index]
        is_cast = target.dtype != self.dtype or operand.exponent(index) != 0
        if is_cast or len(self.segments) > 1:
            return None
        part = target[span]
        if source is target:
            return part, part
        return source[span], part

    def pack(self, operand: Operand, out: np.ndarray) -> None:
        """Write the segments of the 1-D sources into ``out`` (size,), as they travel."""
        if len(self.segments) == 1:
            index, span, _ = self.segments[0]
            pieces = [operand.sources[index][span]]
        else:
            pieces = [operand.sources[index] for index, _, _ in self.segments]
        if operand.exponents is None:
            try:  # checking each dtype first takes longer
                np.concatenate(pieces, out=out, casting="no")
            except TypeError:
                pass
            else:
                return
        for piece, (index, _, place) in zip(pieces, self.segments, strict=True):
            cast_into(piece, out[place], -operand.exponent(index))

    def unpack(self, buffer: np.ndarray, operand: Operand) -> None:
        """Write ``buffer`` (size,), which has travelled, into the segments of the 1-D targets."""
        is_wide = operand.exponents is None and self.dtype != FLOAT16
        for index, span, place in self.segments:
            target = operand.targets[index]
            if is_wide:  # NumPy casts as fast
                target[span] = buffer[place]
            else:
                cast_into(buffer[place], target[span], operand.exponent(index))


@lru_cache(maxsize=8)
def plan_chunks(
    sizes: tuple[int, ...],
    dtypes: tuple[np.dtype, ...],
    chunk_bytes: int,
    packs: bool = True,
) -> list[Chunk]:
    """Divide arrays of ``sizes`` elements into chunks of at most ``chunk_bytes``.

    A large array is divided into equal chunks, which can be summed in the array's own
    memory. Small arrays are packed together, whole, unless ``packs`` is False. A chunk
    has at least one element. ``dtypes`` are the dtypes in which the arrays travel; chunks
    are in the order of the arrays.
    """
    chunks: list[Chunk] = []
    for dtype in dict.fromkeys(dtypes):
        limit = max(1, chunk_bytes // dtype.itemsize)
        small: list[Segment] = []
        filled = 0
        for index, size in enumerate(sizes):
            if dtypes[index] != dtype or size == 0:
                continue
            if not packs or size * SMALL_FRACTION > limit:
                chunks += _chunks_of_one(index, size, dtype, limit)
                continue
            if filled + size > limit:
                chunks.append(Chunk(dtype, tuple(small), filled))
                small = []
                filled = 0
            end = filled + size
            small.append(Segment(index, slice(0, size), slice(filled, end)))
            filled = end
        if small:
            chunks.append(Chunk(dtype, tuple(small), filled))
    return chunks


def _chunks_of_one(
    index: int, size: int, dtype: np.dtype, limit: int
) -> Iterator[Chunk]:
    """Yield equal chunks of whole cache lines of an array; the last one may be shorter."""
    line = max(1, CACHE_LINE // dtype.itemsize)
    even = -(-size // -(-size // limit))
    step = min(limit, -(-even // line) * line)
    for start in range(0, size, step):
        stop = min(size, start + step)
        length = stop - start
        segment = Segment(index, slice(start, stop), slice(0, length))
        yield Chunk(dtype, (segment,), length)


def shard_slice(size: int, shards: int, index: int) -> slice:
    """Return the index-th of nearly equal slices of ``range(size)``."""
    return slice(size * index // shards, size * (index + 1) // shards)
