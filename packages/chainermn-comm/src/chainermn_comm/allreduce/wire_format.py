"""How numbers fit the dtype in which they travel: shifted by a power of two, or wide.

float16 has few exponents. A sum of several ranks' numbers can be too large for it where their mean
is not, and to divide it before it is rounded can make a zero of a small one. So the numbers of a
chunk are shifted to where float16 has its full precision, by a power of two that travels with them.
Where one of them is so large that small ones beside it would suffer, all travel in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..arrays import accumulator
from .float16 import HALF

# float16 numbers lie below 2^16, so shifted sums below 2^15 round to none too large; from 2^11 on
# they are wide.
TOP, LARGE = 15, 2.0**11
# 2^100 times the smallest shift is in the range of float32.
LEAST_SHIFT = -100
# bfloat16 has float32's exponents, but ends a little earlier: what is larger may round to infinity.
LARGE_FOR_BFLOAT16 = 2.0**127


@dataclass(frozen=True)
class Heading:
    """How the numbers of a chunk travel.

    Attributes:
        dtype: in which.
        exponent: times 2 to this power they are what is meant.
    """

    dtype: np.dtype
    exponent: int


def largest_of(numbers: np.ndarray, wire: np.dtype) -> float:
    """The largest magnitude, which may be NaN; 0 where `heading_of` doesn't need it."""
    if wire == accumulator(wire):
        return 0.0
    return max(float(numbers.max(initial=0)), -float(numbers.min(initial=0)))


def heading_of(largest: float, exponent: int, wire: np.dtype) -> Heading:
    """How numbers travel.

    Args:
        largest: at least what `largest_of` says of them, on whichever rank.
        exponent: they lie divided by 2 to this power, so that they are in range.
        wire: the dtype in which gradients travel.
    """
    # Of other types, such as those of 8 bits, it isn't known what fits them.
    limit = {"float16": LARGE, "bfloat16": LARGE_FOR_BFLOAT16}.get(wire.name, 0.0)
    if exponent or not largest < limit:  # or no number
        return Heading(accumulator(wire), exponent)
    if wire != HALF or not largest:
        return Heading(wire, 0)
    return Heading(wire, max(math.frexp(largest)[1] - TOP, LEAST_SHIFT))


def scaled(numbers: np.ndarray, exponent: int, out: np.ndarray) -> None:
    """Write ``numbers * 2**exponent`` into ``out``, of the same dtype and size."""
    np.multiply(numbers, numbers.dtype.type(2.0**exponent), out=out)
