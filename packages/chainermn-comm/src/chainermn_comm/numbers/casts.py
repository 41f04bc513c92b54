"""float16 to float32 and back: the bits of NumPy's own casts, in less time.

NumPy converts one number at a time, and numbers below the range of normal float16
numbers (6e-5), where gradients often are, take many times longer. Here whole blocks
that stay in a core's cache are converted by integer and float32 operations. See
docs/decisions/float16.md.
"""

from __future__ import annotations

import threading
from functools import cache

import numpy as np

FLOAT16, FLOAT32, UINT32 = (
    np.dtype(np.float16),
    np.dtype(np.float32),
    np.dtype(np.uint32),
)
# Elements that are cast or summed at a time: what NumPy allocates for them stays in
# cache and costs no page faults.
BLOCK_ELEMENTS = 1 << 16

MAGNITUDE, EXPONENT, SIGN = (
    UINT32.type(0x7FFFFFFF),
    UINT32.type(0x7F800000),
    UINT32.type(0x8000),
)
# 2^-14 as a float32: below it, float16 numbers are evenly spaced.
SMALLEST_NORMAL = 0x38800000
TOO_LARGE = 0x477FF000  # 65520 as a float32, which rounds to infinity
TIMES_2_13 = UINT32.type(13 << 23)  # added to an exponent
BIAS = UINT32.type((SMALLEST_NORMAL + (13 << 23)) >> 13)


def cast_into(source: np.ndarray, out: np.ndarray) -> None:
    """Write ``source`` into ``out``, cast to its dtype; both 1-D, contiguous, of one length.

    What doesn't fit float16 becomes infinite, and NumPy may warn of that.
    """
    if source.dtype == FLOAT32 and out.dtype == FLOAT16:
        cast_block = _narrow
    elif source.dtype == FLOAT16 and out.dtype == FLOAT32:
        cast_block = _widen
    else:
        np.copyto(out, source, casting="unsafe")
        return
    for start in range(0, source.size, BLOCK_ELEMENTS):
        cast_block(
            source[start : start + BLOCK_ELEMENTS], out[start : start + BLOCK_ELEMENTS]
        )


def add_into(total: np.ndarray, term: np.ndarray) -> None:
    """``total += term``; both 1-D, contiguous, of one length."""
    if not (term.dtype == FLOAT16 and total.dtype == FLOAT32):
        total += term
        return
    for start in range(0, total.size, BLOCK_ELEMENTS):
        block = total[start : start + BLOCK_ELEMENTS]
        wide = _scratch.words[0, : block.size].view(FLOAT32)
        _widen(term[start : start + BLOCK_ELEMENTS], wide)
        block += wide


def _narrow(source: np.ndarray, out: np.ndarray) -> None:
    words = source.view(UINT32)
    rounded, spacing, smallest = _scratch.words[:, : source.size]
    np.bitwise_and(words, MAGNITUDE, out=rounded)
    if rounded.max(initial=0) >= TOO_LARGE:  # or infinite, or no number
        np.copyto(out, source, casting="unsafe")
        return
    # The last place of a number 2^13 times as large is that of the float16 number:
    # adding it rounds there, to nearest even.
    np.bitwise_and(rounded, EXPONENT, out=spacing)
    np.maximum(spacing, smallest, out=spacing)
    spacing += TIMES_2_13
    np.add(rounded.view(FLOAT32), spacing.view(FLOAT32), out=rounded.view(FLOAT32))
    rounded -= spacing
    # The exponent goes to its place in a float16 number, and on top of it the sign.
    spacing >>= UINT32.type(13)
    rounded += spacing
    np.right_shift(words, UINT32.type(16), out=spacing)
    spacing &= SIGN
    spacing -= BIAS
    rounded += spacing
    np.copyto(out.view(np.uint16), rounded, casting="unsafe")


def _widen(source: np.ndarray, out: np.ndarray) -> None:
    np.take(_float16_table(), source.view(np.uint16), out=out, mode="wrap")


@cache
def _float16_table() -> np.ndarray:
    """Every float16 number as float32, by its bits."""
    return np.arange(1 << 16, dtype=np.uint16).view(FLOAT16).astype(FLOAT32)


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.words = np.empty((3, BLOCK_ELEMENTS), UINT32)
        # An array, since with a scalar NumPy doesn't take its vectorized loop.
        self.words[2] = SMALLEST_NORMAL


_scratch = _Scratch()
