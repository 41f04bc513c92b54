"""float16 to float32 and back: the bits of NumPy's own casts, in less time.

NumPy converts one number at a time, and takes many times longer for subnormal float16
numbers (below 6e-5), which gradients often are. Here whole blocks
that stay in a core's cache are converted by integer and float32 operations. See
docs/decisions/sums.md.
"""

from __future__ import annotations

import threading
from functools import cache

import numpy as np

from .dtypes import FLOAT16, FLOAT32, accumulator

UINT32 = np.dtype(np.uint32)
# Elements that are cast or summed at a time: NumPy's memory for them stays in
# cache and costs no page faults.
BLOCK_ELEMENTS = 1 << 16

MAGNITUDE = UINT32.type(0x7FFFFFFF)
EXPONENT = UINT32.type(0x7F800000)
SIGN = UINT32.type(0x8000)
# 2^-14 as a float32: below it, float16 numbers are evenly spaced.
SMALLEST_NORMAL = 0x38800000
TOO_LARGE = 0x477FF000  # 65520 as a float32, which rounds to infinity
TIMES_2_13 = UINT32.type(13 << 23)  # adds 13 to an exponent
BIAS = UINT32.type((SMALLEST_NORMAL + (13 << 23)) >> 13)


def cast_into(source: np.ndarray, out: np.ndarray, exponent: int = 0) -> None:
    """Write ``source * 2**exponent`` into ``out``, cast to its dtype.

    Both arrays are 1-D, contiguous and equally long. Numbers that are too large for
    float16 become infinite, and NumPy may warn.
    """
    for start in range(0, source.size, BLOCK_ELEMENTS):
        block = source[start : start + BLOCK_ELEMENTS]
        if exponent:
            block = cast(block, accumulator(block.dtype)) * FLOAT32.type(2.0**exponent)
        _cast_block(block, out[start : start + BLOCK_ELEMENTS])


def cast(block: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return at most BLOCK_ELEMENTS numbers as ``dtype``: the same array, or a new one."""
    if block.dtype == dtype:
        return block
    out = np.empty(block.size, dtype)
    _cast_block(block, out)
    return out


def _cast_block(source: np.ndarray, out: np.ndarray) -> None:
    if source.dtype == FLOAT32 and out.dtype == FLOAT16:
        _narrow(source, out)
    elif source.dtype == FLOAT16 and out.dtype == FLOAT32:
        np.take(_float16_table(), source.view(np.uint16), out=out, mode="wrap")
    else:
        np.copyto(out, source, casting="unsafe")


def _narrow(source: np.ndarray, out: np.ndarray) -> None:
    words = source.view(UINT32)
    rounded, spacing, smallest = _scratch.words[:, : source.size]
    np.bitwise_and(words, MAGNITUDE, out=rounded)
    if rounded.max(initial=0) >= TOO_LARGE:  # or the number is infinite or NaN
        np.copyto(out, source, casting="unsafe")
        return
    # The last bit of a number that is 2^13 times as large has the value of the float16
    # number's last bit, so adding it rounds to nearest even.
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


@cache
def _float16_table() -> np.ndarray:
    """Return every float16 number as float32, by its bits."""
    return np.arange(1 << 16, dtype=np.uint16).view(FLOAT16).astype(FLOAT32)


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.words = np.empty((3, BLOCK_ELEMENTS), UINT32)
        # An array, since with a scalar NumPy doesn't take its vectorized loop.
        self.words[2] = SMALLEST_NORMAL


_scratch = _Scratch()
