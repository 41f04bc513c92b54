"""How gradients are cut into chunks, packed into buffers and unpacked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .halves import HALF, SINGLE, convert


@dataclass(frozen=True)
class Chunk:
    """A stretch of gradients that travels together.

    Attributes:
        dtype: in which it travels.
        parts: (index of the array, start, stop) of each stretch of elements, flattened.
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
        with np.errstate(all="ignore"):  # in a narrow wire dtype
            if len(self.parts) == 1:
                index, start, stop = self.parts[0]
                convert(flats[index][start:stop], out)
                return
            pieces = [flats[index][start:stop] for index, start, stop in self.parts]
            if out.dtype == HALF and all(piece.dtype == SINGLE for piece in pieces):
                convert(np.concatenate(pieces), out)
            else:
                np.concatenate(pieces, out=out, casting="unsafe")

    def unpack(self, buffer: np.ndarray, flats: Sequence[np.ndarray]) -> None:
        """Write ``buffer`` (size,) back into the parts of ``flats``."""
        if len(self.parts) == 1:
            index, start, stop = self.parts[0]
            convert(buffer, flats[index][start:stop])
            return
        if buffer.dtype == HALF:  # at once, since its parts may be many and small
            halves, buffer = buffer, np.empty(buffer.size, SINGLE)
            convert(halves, buffer)
        filled = 0
        for index, start, stop in self.parts:
            end = filled + stop - start
            flats[index][start:stop] = buffer[filled:end]
            filled = end


@lru_cache(maxsize=8)
def cut(sizes: tuple[int, ...], dtypes: tuple[np.dtype, ...], chunk_bytes: int) -> list[Chunk]:
    """Cut arrays, laid end to end by dtype, into chunks of at most ``chunk_bytes``.

    Args:
        sizes: elements of each array.
        dtypes: the dtype in which each travels.
        chunk_bytes: the limit; at least one element.

    Returns:
        The chunks in the order of the arrays, dtype by dtype.
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
    room = limit
    for index, size in enumerate(sizes):
        start = 0 if dtypes[index] == dtype else size
        while start < size:
            stop = min(size, start + room)
            parts.append((index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield Chunk(dtype, tuple(parts), limit)
                parts, room = [], limit
    if parts:
        yield Chunk(dtype, tuple(parts), limit - room)
