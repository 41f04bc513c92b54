"""How numbers fit the dtype in which they travel: with a common exponent, or in a wider dtype.

float16 has few exponents. A sum of several ranks' numbers can be too large for it where
their mean is not, and dividing before rounding can make zeros of small numbers. So the
numbers of an array, or of a part that fits a chunk, are divided by a power of two that
brings them to where float16 has its full precision, and its exponent travels with them.
Where one number is so large that small ones would lose precision, all travel in
float32. Between nodes that is done by chunk, for sums and for means.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .arrays import accumulator
from .casts import FLOAT16

# Scaled sums are below 2^15, which float16 holds (its limit is 2^16). Where a number is
# 2^11 or more before it is scaled, all travel in float32.
TOP_EXPONENT, LARGE = 15, 2.0**11
# 2^100 times the smallest number is in the range of float32.
LEAST_EXPONENT = -100
# bfloat16 has float32's exponents, but its largest number is a little smaller: what is
# larger may round to infinity.
LARGE_FOR_BFLOAT16 = 2.0**127


@dataclass(frozen=True)
class WireFormat:
    """How some numbers travel: as ``dtype``, divided by 2**exponent."""

    dtype: np.dtype
    exponent: int


def absmax(numbers: np.ndarray, wire: np.dtype) -> float:
    """Return the largest magnitude, which may be NaN; 0 where the wire dtype doesn't need it."""
    if wire == accumulator(wire):
        return 0.0
    return max(float(numbers.max(initial=0)), -float(numbers.min(initial=0)))


def absmax_each(numbers: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Return the largest magnitude (maybe NaN) of each slice of ``sizes`` numbers; float64."""
    starts = [0, *itertools.accumulate(sizes[:-1])]
    largest = np.maximum.reduceat(numbers, starts)
    absmax: np.ndarray = np.maximum(largest, -np.minimum.reduceat(numbers, starts))
    return absmax.astype(np.float64)


def choose_wire_format(largest: float, exponent: int, wire: np.dtype) -> WireFormat:
    """Choose how numbers whose `absmax` is at most ``largest`` on any rank travel as ``wire``.

    They are already divided by 2**exponent, so that they are in range.
    """
    is_narrow, exponents = fit_each(np.array([largest]), wire)
    if exponent or not is_narrow[0]:
        return WireFormat(accumulator(wire), exponent)
    # Zeros take the least exponent, which is too large for no other rank's numbers.
    if largest == 0 and wire == FLOAT16:
        return WireFormat(wire, LEAST_EXPONENT)
    return WireFormat(wire, int(exponents[0]))


def bound_of(exponent: float, is_narrow: bool) -> float:
    """Return what :func:`mean_format` needs of a format in which a rank's sums travel."""
    return exponent if is_narrow else math.inf


def mean_format(bound: float, wire: np.dtype, is_cast: bool) -> WireFormat:
    """Choose how means over ranks travel; ``bound`` is the largest :func:`bound_of` the ranks'.

    They need a format only where some of them are for arrays of another dtype
    (``is_cast``).
    """
    if not is_cast or wire == accumulator(wire):
        return WireFormat(wire, 0)
    return (
        WireFormat(accumulator(wire), 0)
        if math.isinf(bound)
        else WireFormat(wire, int(bound))
    )


def fit_each(largest: np.ndarray, wire: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return of each `absmax` whether its numbers travel as ``wire``, and their exponent then."""
    # The range of other dtypes, such as those of 8 bits, isn't known here.
    limit = {"float16": LARGE, "bfloat16": LARGE_FOR_BFLOAT16}.get(wire.name, 0.0)
    is_narrow = largest < limit  # which NaN is not
    exponents = np.zeros(largest.shape, int)
    if wire == FLOAT16:
        fitting = np.maximum(np.frexp(largest)[1] - TOP_EXPONENT, LEAST_EXPONENT)
        np.copyto(exponents, fitting, where=is_narrow & (largest > 0))
    return is_narrow, exponents


def ldexp_into(numbers: np.ndarray, exponent: int, out: np.ndarray) -> None:
    """Write ``numbers * 2**exponent`` into ``out``, of the same dtype and size."""
    np.multiply(numbers, numbers.dtype.type(2.0**exponent), out=out)


def ldexp_each(
    numbers: np.ndarray, exponents: np.ndarray, sizes: Sequence[int]
) -> None:
    """Multiply each slice of ``sizes`` numbers by 2 to the power of its exponent."""
    if exponents.any():
        factors = np.ldexp(numbers.dtype.type(1), exponents)
        numbers *= factors if len(sizes) == 1 else np.repeat(factors, sizes)
