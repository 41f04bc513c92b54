"""Reads rows of NumPy arrays as bytes, block by block, without a copy of them all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# Of this size and more, blocks are written equally fast; they stay in the cache until then.
BLOCK_BYTES = 1 << 20


def blocks(source: np.ndarray, indices: np.ndarray) -> Iterator[np.ndarray]:
    """The bytes of the rows ``source[indices]``, one after another.

    Args:
        source: array of any shape (n, ...), memory order and dtype without Python objects.
        indices: int64 array of shape (m,), each in ``range(n)``.

    Yields:
        uint8 arrays, 1-D. Each is overwritten when the next one is asked for.
    """
    row = source[:1].nbytes  # 0 for an empty source too, which has no rows to take
    if not row or not len(indices):
        return
    plain = source.flags.c_contiguous
    # Whatever the dtype, and whether it is aligned: np.take would copy the whole otherwise.
    rows = source.reshape(-1).view(np.uint8).reshape(len(source), row) if plain else source
    if plain and _is_run(indices):
        whole = rows[indices[0] : indices[0] + len(indices)].reshape(-1)
        for begin in range(0, len(whole), BLOCK_BYTES):
            yield whole[begin : begin + BLOCK_BYTES]
        return
    count = min(len(indices), max(1, BLOCK_BYTES // row))
    buffer = np.empty((count, *rows.shape[1:]), rows.dtype)
    for begin in range(0, len(indices), count):
        chosen = indices[begin : begin + count]
        block = buffer[: len(chosen)]
        if plain:
            np.take(rows, chosen, axis=0, out=block, mode="clip")  # "raise" would buffer
        else:
            block[...] = rows[chosen]
        yield block.reshape(-1).view(np.uint8)


def _is_run(indices: np.ndarray) -> bool:
    span = indices[-1] - indices[0]
    return span == len(indices) - 1 and bool((np.diff(indices) == 1).all())
