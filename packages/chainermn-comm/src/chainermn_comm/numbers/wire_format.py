"""How numbers fit the dtype in which they travel: divided by a power of two, or in a wider dtype.

float16 has few exponents. A sum of several ranks' numbers can be too large for float16
although their mean is not, and dividing before rounding can turn small numbers into
zeros. So the numbers of an array are divided by a power of two that brings them into the
range of float16's full precision. If one number is so large that small numbers would lose
precision, the whole array travels in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .casts import BLOCK_ELEMENTS
from .dtypes import FLOAT16, accumulator

# Sums that are divided by 2**exponent are below 2^15, which float16 holds (its limit is
# 2^16).
TOP_EXPONENT = 15
# 2^100 times the smallest number is in the range of float32.
LEAST_EXPONENT = -100
# Numbers travel in 16 bits if their sums are smaller than these limits. In float16, sums
# above 2^11 would leave too few bits to small numbers. bfloat16 has float32's exponents,
# but its largest number is a little smaller, so larger sums may round to infinity. Other
# dtypes, such as those of 8 bits, have no limit here.
LIMITS = {"float16": 2.0**11, "bfloat16": 2.0**127}


@dataclass(frozen=True)
class WireFormat:
    """How some numbers travel: as ``dtype``, divided by 2**exponent."""

    dtype: np.dtype
    exponent: int = 0


def absmax(numbers: np.ndarray) -> float:
    """Return the largest magnitude of 1-D numbers, which may be NaN; 0 if there are none."""
    found = 0.0
    for start in range(0, numbers.size, BLOCK_ELEMENTS):
        block = numbers[start : start + BLOCK_ELEMENTS]
        largest = np.maximum(block.max(), -block.min())
        found = float(np.maximum(found, largest))  # NaN if one of them is
    return found


def choose_wire_format(bound: float, wire: np.dtype) -> WireFormat:
    """Choose how numbers travel as ``wire``, whose sums over ranks are at most ``bound``."""
    if not bound < LIMITS.get(wire.name, 0.0):  # or NaN
        return WireFormat(accumulator(wire))
    if wire != FLOAT16 or bound == 0:
        return WireFormat(wire)
    exponent = math.frexp(bound)[1] - TOP_EXPONENT
    return WireFormat(wire, max(exponent, LEAST_EXPONENT))
