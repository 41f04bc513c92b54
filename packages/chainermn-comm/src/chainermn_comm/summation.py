"""Sums in rank order, the same bits on whichever rank they are taken."""

from __future__ import annotations

import numpy as np

from .arrays import accumulator


def sum_rows(rows: np.ndarray, out: np.ndarray, divisor: int = 1) -> None:
    """Sum over ranks and divide, in float32 or wider.

    Args:
        rows: shape (ranks, n), any numeric dtype.
        out: shape (n,), same dtype; receives the result; shares no memory with ``rows``
            unless there is one row.
        divisor: other than 1 for floats only. The sum is divided by it before it is rounded to
            ``out``'s dtype; where it overflows, it is taken anew of divided terms.
    """
    dtype = accumulator(rows.dtype)
    try:
        with np.errstate(over="raise" if divisor > 1 else "ignore", invalid="ignore"):
            total = _add(rows, out, dtype)
    except FloatingPointError:
        total = _mean_of_large(rows, dtype, divisor)
    else:
        if divisor > 1:
            _divide(total, divisor)
    if total is not out:
        with np.errstate(over="ignore", invalid="ignore"):
            out[...] = total


def _add(rows: np.ndarray, out: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if len(rows) == 1:
        return np.array(rows[0], dtype)
    if dtype == rows.dtype:  # the sum can be formed where it belongs
        np.add(rows[0], rows[1], out=out)
        total = out
    else:
        total = rows[0].astype(dtype)
        total += rows[1]
    for row in rows[2:]:
        total += row
    return total


def _divide(total: np.ndarray, divisor: int) -> None:
    if divisor & (divisor - 1) == 0:
        total *= total.dtype.type(1 / divisor)  # exact for a power of two, and faster
    else:
        total /= total.dtype.type(divisor)


def _mean_of_large(rows: np.ndarray, dtype: np.dtype, divisor: int) -> np.ndarray:
    # Elements that are small enough keep the bits that they would have had alone.
    with np.errstate(over="ignore", invalid="ignore"):
        total = rows[0].astype(dtype)
        scaled = total / dtype.type(divisor)
        for row in rows[1:]:
            total += row
            scaled += row.astype(dtype) / dtype.type(divisor)
        _divide(total, divisor)
        return np.where(np.isfinite(total), total, scaled)
