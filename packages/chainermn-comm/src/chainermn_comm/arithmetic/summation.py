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
    """Sum over ranks and divide, in float32 or wider; or take the maximum or minimum.

    Args:
        rows: 1-D arrays of one dtype and length, in rank order; unchanged, but for the one
            that ``out`` may be.
        out: the result; same length, of the rows' dtype or of one that accumulates in it.
        divisor: other than 1 for floats only. The sum is divided by it before it is rounded to
            ``out``'s dtype; a sum that overflows is computed again from divided terms. Overflow is
            noticed only within :func:`overflow_errstate`, which the caller enters, since entering
            it for each block would cost too much.
        work: memory for the sum, of ``out``'s length and :func:`accumulator`'s dtype; saves an
            allocation. It may be ``out``, unless a row after the first two is.
        originals: the rows in other memory, where ``work`` overwrites one.
        op: add, maximum or minimum; of the latter there is no divisor, and no complex number.
    """
    if op is not np.add:
        out[...] = reduce(op, originals or rows)
        return
    if out.dtype.kind == "c":  # part by part, as a divisor mustn't mix inf + 0j's
        parts = [list(map(_parts, each)) for each in (rows, originals or ())]
        sum_rows(parts[0], _parts(out), divisor, None if work is None else _parts(work), parts[1])
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

    That is one that :func:`accumulator` returns. Where the sum overflows, which is noticed only
    within :func:`overflow_errstate`, it is divided by a power of two, whose exponent is returned;
    else 0.
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
def _arithmetic(dtype: np.dtype, divisor: float) -> tuple[np.dtype, bool, np.ufunc, np.ndarray]:
    """Return the dtype to sum in, whether it differs, and ufunc and operand of the division."""
    wide = accumulator(dtype)
    if math.frexp(divisor)[0] == 0.5:  # a power of two: exact, and faster
        return wide, wide != dtype, np.multiply, np.array(1 / divisor, wide)
    return wide, wide != dtype, np.divide, np.array(divisor, wide)


def _mean_of_large(rows: Sequence[np.ndarray], dtype: np.dtype, divisor: float) -> np.ndarray:
    # Terms divided by a power of two that is at least their number are exact, their sum stays
    # in range, and dividing it by the rest rounds once. Elements whose plain sum doesn't
    # overflow get the same bits as without their neighbours.
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
