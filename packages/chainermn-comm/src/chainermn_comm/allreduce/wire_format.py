"""How numbers fit the dtype in which they travel: with a common exponent, or in a wider dtype.

float16 has few exponents. A sum of several ranks' numbers can be too large for it where their mean
is not, and dividing before rounding can make zeros of small numbers. So the numbers of a chunk are
divided by a power of two that brings them to where float16 has its full precision, and its
exponent travels with them. Where one number is so large that small ones would lose precision, all
travel in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..arrays import accumulator
from .casts import FLOAT16

# Scaled sums are below 2^15, which float16 holds (its limit is 2^16). Chunks in which a number is
# 2^11 or more before it is scaled travel in float32.
TOP_EXPONENT, LARGE = 15, 2.0**11
# 2^100 times the smallest number is in the range of float32.
LEAST_EXPONENT = -100
# bfloat16 has float32's exponents, but its largest number is a little smaller: what is larger may
# round to infinity.
LARGE_FOR_BFLOAT16 = 2.0**127


@dataclass(frozen=True)
class WireFormat:
    """How the numbers of a chunk travel: as ``dtype``, divided by 2**exponent."""

    dtype: np.dtype
    exponent: int


def absmax(numbers: np.ndarray, wire: np.dtype) -> float:
    """Return the largest magnitude, which may be NaN; 0 where the wire dtype doesn't need it."""
    if wire == accumulator(wire):
        return 0.0
    return max(float(numbers.max(initial=0)), -float(numbers.min(initial=0)))


def choose_wire_format(largest: float, exponent: int, wire: np.dtype) -> WireFormat:
    """Choose how numbers whose `absmax` is at most ``largest`` on any rank travel as ``wire``.

    They are already divided by 2**exponent, so that they are in range.
    """
    # Of other dtypes, such as those of 8 bits, the range isn't known here.
    limit = {"float16": LARGE, "bfloat16": LARGE_FOR_BFLOAT16}.get(wire.name, 0.0)
    if exponent or not largest < limit:  # or NaN
        return WireFormat(accumulator(wire), exponent)
    if wire != FLOAT16 or not largest:
        return WireFormat(wire, 0)
    return WireFormat(wire, max(math.frexp(largest)[1] - TOP_EXPONENT, LEAST_EXPONENT))


def ldexp_into(numbers: np.ndarray, exponent: int, out: np.ndarray) -> None:
    """Write ``numbers * 2**exponent`` into ``out``, of the same dtype and size."""
    np.multiply(numbers, numbers.dtype.type(2.0**exponent), out=out)
