"""How gradients are cut into chunks, packed into buffers and unpacked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .float16 import HALF, SINGLE, convert

# Arrays of at most this part of a chunk are packed together: three quarters of each such chunk
# are full then, and the copies that packing takes are few bytes of most models.
SMALL = 4
CACHE_LINE = 64


@dataclass(frozen=True)
class Chunk:
    """A stretch of gradients that travels together.

    Attributes:
        dtype: in which it travels.
        parts: (index of the array, start, stop) of each stretch of elements, flattened; if there
            are several, each is a whole array.
        size: number of elements.
    """

    dtype: np.dtype
    parts: tuple[tuple[int, int, int], ...]
    size: int

    @property
    def nbytes(self) -> int:
        """Number of bytes that travel."""
        return self.size * self.dtype.itemsize

    def pack(self, flats: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Write the parts of ``flats`` (1-D each) into ``out`` (size,), cast to its dtype."""
        pieces = [flats[index] for index, _, _ in self.parts]
        if len(pieces) == 1:
            _, start, stop = self.parts[0]
            pieces = [pieces[0][start:stop]]
        with contextlib.suppress(TypeError):  # looking at each dtype before takes longer
            np.concatenate(pieces, out=out, casting="no")
            return
        dtypes = {piece.dtype for piece in pieces}
        with np.errstate(all="ignore"):  # in a narrow wire dtype
            if len(pieces) == 1:
                convert(pieces[0], out)
            elif out.dtype == HALF and dtypes == {SINGLE}:
                convert(np.concatenate(pieces), out)
            else:
                np.concatenate(pieces, out=out, casting="unsafe")

    def unpack(self, buffer: np.ndarray, flats: Sequence[np.ndarray]) -> None:
        """Write ``buffer`` (size,) back into the parts of ``flats``."""
        if len(self.parts) == 1:
            index, start, stop = self.parts[0]
            convert(buffer, flats[index][start:stop])
            return
        if buffer.dtype == HALF and any(flats[index].dtype != HALF for index, _, _ in self.parts):
            # At once, since the parts may be many and small.
            halves, buffer = buffer, np.empty(buffer.size, SINGLE)
            convert(halves, buffer)
        filled = 0
        for index, _, size in self.parts:
            end = filled + size
            flats[index][...] = buffer[filled:end]
            filled = end


@lru_cache(maxsize=8)
def cut(sizes: tuple[int, ...], dtypes: tuple[np.dtype, ...], chunk_bytes: int) -> list[Chunk]:
    """Cut arrays into chunks of at most ``chunk_bytes``, or of one element.

    A large array is cut into equal chunks of its own, so that they can be added to it where it
    lies; only small ones are packed together, whole.

    Args:
        sizes: elements of each array.
        dtypes: the dtype in which each travels.
        chunk_bytes: the limit.

    Returns:
        The chunks, dtype by dtype.
    """
    return [
        chunk
        for dtype in dict.fromkeys(dtypes)
        for chunk in _cut_one_dtype(sizes, dtypes, dtype, max(1, chunk_bytes // dtype.itemsize))
    ]


def _cut_one_dtype(
    sizes: tuple[int, ...], dtypes: tuple[np.dtype, ...], dtype: np.dtype, limit: int
) -> Iterator[Chunk]:
    parts: list[tuple[int, int, int]] = []
    filled = 0
    for index, size in enumerate(sizes):
        if dtypes[index] != dtype or size == 0:
            continue
        if size * SMALL > limit:
            step = _step(size, limit, dtype.itemsize)
            for start in range(0, size, step):
                stop = min(size, start + step)
                yield Chunk(dtype, ((index, start, stop),), stop - start)
            continue
        if filled + size > limit:
            yield Chunk(dtype, tuple(parts), filled)
            parts, filled = [], 0
        parts.append((index, 0, size))
        filled += size
    if parts:
        yield Chunk(dtype, tuple(parts), filled)


def _step(size: int, limit: int, itemsize: int) -> int:
    """Elements of each chunk of a large array, of which the last may be shorter."""
    line = max(1, CACHE_LINE // itemsize)
    even = -(-size // -(-size // limit))
    return min(limit, -(-even // line) * line)
