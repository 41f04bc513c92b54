"""How a node's sums fit the dtype in which they travel: shifted by a power of two, or wide.

float16 has few exponents. A sum of several ranks' numbers can be too large for it where their mean
is not, and to divide it before it is rounded can make a zero of a small one. So the sums of a chunk
are shifted to where float16 has its full precision, by a power of two that travels with them. Where
one number of the chunk is so large that small ones beside it would suffer, all travel in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .arrays import accumulator
from .halves import HALF

# float16 numbers lie below 2^16, so shifted sums below 2^15 round to none too large; from 2^11 on
# they are wide.
TOP, LARGE = 15, 2.0**11
# 2^100 times the smallest shift is in the range of float32.
LEAST_SHIFT = -100


@dataclass(frozen=True)
class Heading:
    """How the sums of a chunk travel.

    Attributes:
        dtype: of the numbers that travel.
        exponent: times 2 to this power they are the sums.
    """

    dtype: np.dtype
    exponent: int


def largest_of(sums: np.ndarray, wire: np.dtype) -> float:
    """The largest magnitude, which may be NaN; 0 where `heading_of` doesn't need it."""
    if wire != HALF:
        return 0.0
    return max(float(sums.max(initial=0)), -float(sums.min(initial=0)))


def heading_of(largest: float, exponent: int, wire: np.dtype) -> Heading:
    """How sums travel.

    Args:
        largest: by `largest_of`.
        exponent: the sums lie divided by 2 to this power, so that they are in range.
        wire: the dtype in which gradients travel.
    """
    if wire != HALF:
        wide = exponent > 0 or wire == accumulator(wire)
        return Heading(accumulator(wire) if wide else wire, exponent)
    if exponent or not largest < LARGE:  # or no number
        return Heading(accumulator(wire), exponent)
    if not largest:
        return Heading(wire, 0)
    return Heading(wire, max(math.frexp(largest)[1] - TOP, LEAST_SHIFT))


def scaled(numbers: np.ndarray, exponent: int, out: np.ndarray) -> None:
    """Write ``numbers * 2**exponent`` into ``out``, of the same dtype and size."""
    np.multiply(numbers, numbers.dtype.type(2.0**exponent), out=out)
