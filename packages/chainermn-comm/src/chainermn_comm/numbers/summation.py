"""Sums of rows in rank order: the same bits on whichever rank they are taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, reduce

import numpy as np

from .arrays import accumulator
from .casts import add_into, cast_into


def sum_rows(
    rows: Sequence[np.ndarray],
    out: np.ndarray,
    divisor: float = 1,
    work: np.ndarray | None = None,
    originals: Sequence[np.ndarray] | None = None,
    op: np.ufunc = np.add,
) -> None:
    """Sum 1-D rows of ranks and divide, in float32 or wider; or take the maximum or minimum.

    Rows are unchanged, but for the one that ``out`` may be, which has their dtype or
    one that accumulates in it. A sum of floats, no other, is divided before it is
    rounded; one that overflows is computed again from divided terms. That is noticed
    only within :func:`overflow_errstate`, which the caller enters, as it costs too much
    for each block.

    ``work`` is memory for the sum, of :func:`accumulator`'s dtype; it may be ``out``,
    unless a row after the first two is. ``originals`` are the rows in other memory,
    where it overwrites one.
    """
    if op is not np.add:
        out[...] = reduce(op, originals or rows)
        return
    if out.dtype.kind == "c":  # part by part, as a divisor mustn't mix inf + 0j's
        parts = [list(map(_parts, each)) for each in (rows, originals or ())]
        sum_rows(
            parts[0],
            _parts(out),
            divisor,
            None if work is None else _parts(work),
            parts[1],
        )
        return
    dtype, widened, scale, factor = _arithmetic(out.dtype, divisor)
    total = work
    try:
        if widened or len(rows) == 1:
            if total is None:
                total = np.empty(len(rows[0]), dtype)
            cast_into(rows[0], total)
            rest = rows[1:]
        else:
            total = np.add(rows[0], rows[1], out=total)
            rest = rows[2:]
        for row in rest:
            add_into(total, row)
        if divisor != 1:
            total = scale(total, factor, out=total if widened else out)
        if total is out:
            return
    except FloatingPointError:
        total = _mean_of_large(originals or rows, dtype, divisor)
    with np.errstate(all="ignore"):
        cast_into(total, out)


def scaled_sum(rows: Sequence[np.ndarray], out: np.ndarray) -> int:
    """Sum rows in rank order into ``out``, which is in other memory and has their dtype.

    That is one that :func:`accumulator` returns. Where the sum overflows, which is
    noticed only within :func:`overflow_errstate`, it is divided by a power of two,
    whose exponent is returned; else 0.
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


def overflow_errstate() -> np.errstate:
    """Return the context in which NumPy raises on overflow and ignores all other conditions."""
    return np.errstate(all="ignore", over="raise")


def _parts(numbers: np.ndarray) -> np.ndarray:
    """Return a view of complex numbers as twice as many real ones."""
    return numbers.view(numbers.real.dtype)


@cache
def _arithmetic(
    dtype: np.dtype, divisor: float
) -> tuple[np.dtype, bool, np.ufunc, np.ndarray]:
    """Return the dtype to sum in, whether it differs, and ufunc and operand of the division."""
    wide = accumulator(dtype)
    if math.frexp(divisor)[0] == 0.5:  # a power of two: exact, and faster
        return wide, wide != dtype, np.multiply, np.array(1 / divisor, wide)
    return wide, wide != dtype, np.divide, np.array(divisor, wide)


def _mean_of_large(
    rows: Sequence[np.ndarray], dtype: np.dtype, divisor: float
) -> np.ndarray:
    # Terms divided by a power of two that is at least their number are exact, their sum
    # stays in range, and dividing it by the rest rounds once. Elements whose plain sum
    # doesn't overflow get the same bits as without their neighbours.
    power = 1 << (len(rows) - 1).bit_length()
    _, _, scale, factor = _arithmetic(dtype, divisor)
    with np.errstate(all="ignore"):
        total = rows[0].astype(dtype)
        scaled = total / dtype.type(power)
        for row in rows[1:]:
            total += row
            scaled += row.astype(dtype) / dtype.type(power)
        mean = scale(total, factor)
        chosen: np.ndarray = np.where(
            np.isfinite(mean), mean, scaled / dtype.type(divisor / power)
        )
        return chosen
