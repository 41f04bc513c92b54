"""Sums in rank order, the same bits on whichever rank they are taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from ..arrays import accumulator
from .float16 import add, convert


def sum_rows(
    rows: Sequence[np.ndarray],
    out: np.ndarray,
    divisor: float = 1,
    work: np.ndarray | None = None,
    intact: Sequence[np.ndarray] | None = None,
) -> None:
    """Sum over ranks and divide, in float32 or wider.

    Args:
        rows: 1-D arrays of one dtype and length, in rank order; unchanged, but for the one
            that ``out`` may be.
        out: same length; of the rows' dtype, or of one that is summed in it. Receives the result.
        divisor: other than 1 for floats only. The sum is divided by it before it is rounded to
            ``out``'s dtype; a sum that overflows is taken anew of divided terms. NumPy tells of
            overflow only in :func:`telling_of_overflow`, which costs too much to enter here:
            callers with a divisor do.
        work: where the sum is taken, of ``out``'s length and :func:`accumulator`'s dtype; saves
            an allocation. It may be ``out``, unless a row after the first two is.
        intact: the rows in other memory, where ``work`` overwrites one.
    """
    dtype, widened, scale, factor = _arithmetic(out.dtype, divisor)
    total = work
    try:
        if widened or len(rows) == 1:
            if total is None:
                total = np.empty(len(rows[0]), dtype)
            convert(rows[0], total)
            rest = rows[1:]
        else:
            total = np.add(rows[0], rows[1], out=total)
            rest = rows[2:]
        for row in rest:
            add(total, row)
        if not widened:  # scaling writes the sum where it belongs
            scale(total, factor, out=out)
            return
        scale(total, factor, out=total)
    except FloatingPointError:
        total = _mean_of_large(intact or rows, dtype, divisor)
    with np.errstate(all="ignore"):
        convert(total, out)


def sum_in_range(rows: Sequence[np.ndarray], out: np.ndarray) -> int:
    """Sum over ranks, divided by a power of two only where the sum would overflow.

    Args:
        rows: 1-D arrays in rank order, of a dtype that sums are taken in.
        out: receives the result; of their dtype and length, and in other memory.

    Returns:
        The exponent of the power of two: 0 as a rule. Overflow is noticed in
        :func:`telling_of_overflow`.
    """
    try:
        if len(rows) == 1:
            np.copyto(out, rows[0])
        else:
            np.add(rows[0], rows[1], out=out)
        for row in rows[2:]:
            out += row
    except FloatingPointError:
        exponent = (len(rows) - 1).bit_length()
        out[...] = _mean_of_large(rows, out.dtype, 1 << exponent)
        return exponent
    return 0


def telling_of_overflow() -> np.errstate:
    """The context in which a sum that overflows can be noticed, whatever else the user set."""
    return np.errstate(all="ignore", over="raise")


@cache
def _arithmetic(dtype: np.dtype, divisor: float) -> tuple[np.dtype, bool, np.ufunc, np.ndarray]:
    """The dtype to sum in, whether that is another one, and how to divide: ufunc and operand."""
    wide = accumulator(dtype)
    if dtype.kind == "b":
        return wide, False, np.logical_and, np.array(True)
    if math.frexp(divisor)[0] == 0.5:  # a power of two: exact, and faster
        return wide, wide != dtype, np.multiply, np.array(1 / divisor, wide)
    return wide, wide != dtype, np.divide, np.array(divisor, wide)


def _mean_of_large(rows: Sequence[np.ndarray], dtype: np.dtype, divisor: float) -> np.ndarray:
    # Terms divided by a power of two that is at least their number are exact, their sum stays
    # in range, and dividing it by the rest rounds once. Elements whose plain sum doesn't
    # overflow get the bits that they would have without their neighbours.
    power = 1 << (len(rows) - 1).bit_length()
    _, _, scale, factor = _arithmetic(dtype, divisor)
    with np.errstate(all="ignore"):
        total = rows[0].astype(dtype)
        scaled = total / dtype.type(power)
        for row in rows[1:]:
            total += row
            scaled += row.astype(dtype) / dtype.type(power)
        mean = scale(total, factor)
        chosen: np.ndarray = np.where(np.isfinite(mean), mean, scaled / dtype.type(divisor / power))
        return chosen
