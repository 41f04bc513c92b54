"""Sums in rank order, the same bits on whichever rank they are taken."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from .arrays import accumulator


def sum_rows(rows: Sequence[np.ndarray], out: np.ndarray, divisor: int = 1) -> None:
    """Sum over ranks and divide, in float32 or wider.

    Args:
        rows: two or more 1-D arrays of one dtype and length, in rank order; unchanged, but for
            the one that ``out`` may be.
        out: same dtype and length; receives the result.
        divisor: other than 1 for floats only. The sum is divided by it before it is rounded to
            ``out``'s dtype; a sum that overflows is taken anew of divided terms. NumPy tells of
            overflow only while ``np.errstate(over="raise")`` holds, which costs too much to
            enter here: callers with a divisor do.
    """
    dtype = accumulator(out.dtype)
    try:
        total = _add(rows, dtype)
        if divisor > 1:
            total = _divide(total, divisor, out)
    except FloatingPointError:
        total = _mean_of_large(rows, dtype, divisor)
    if total is not out:
        with np.errstate(over="ignore"):
            out[...] = total


def _add(rows: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    total = rows[0] + rows[1] if dtype == rows[0].dtype else rows[0].astype(dtype) + rows[1]
    for row in rows[2:]:
        total += row
    return total


def _divide(total: np.ndarray, divisor: int, out: np.ndarray) -> np.ndarray:
    if total.dtype != out.dtype:
        out = total
    if divisor & (divisor - 1):
        return np.divide(total, _scalar(divisor, total.dtype), out=out)
    # Exact for a power of two, and faster.
    return np.multiply(total, _scalar(1 / divisor, total.dtype), out=out)


@cache
def _scalar(value: float, dtype: np.dtype) -> np.ndarray:
    return np.array(value, dtype)


def _mean_of_large(rows: Sequence[np.ndarray], dtype: np.dtype, divisor: int) -> np.ndarray:
    # Terms divided by a power of two that is at least `divisor` are exact, their sum stays in
    # range, and dividing it by the rest rounds once. Elements whose plain sum doesn't overflow
    # get the bits that they would have without their neighbours.
    power = 1 << (divisor - 1).bit_length()
    with np.errstate(over="ignore", invalid="ignore"):
        total = rows[0].astype(dtype)
        scaled = total / _scalar(power, dtype)
        for row in rows[1:]:
            total += row
            scaled += row.astype(dtype) / _scalar(power, dtype)
        mean = _divide(total, divisor, total)
        return np.where(np.isfinite(mean), mean, scaled / _scalar(divisor / power, dtype))
