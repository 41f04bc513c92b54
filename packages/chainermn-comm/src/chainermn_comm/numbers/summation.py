"""Sums of rows in rank order: the same bits on whichever rank they are taken."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .casts import BLOCK_ELEMENTS, cast, cast_into
from .dtypes import accumulator


def sum_rows(
    rows: Sequence[np.ndarray],
    out: np.ndarray,
    divisor: int = 1,
    op: np.ufunc = np.add,
) -> None:
    """Write the sum of the ranks' rows in rank order, divided, or their maximum or minimum.

    Rows are 1-D, contiguous and as long as ``out``, which may be one of them. Their dtype
    is that of ``out``, or its :func:`accumulator`, in which numbers are added and divided
    before they are rounded. Only floats may be divided.
    """
    if out.size > BLOCK_ELEMENTS:
        for start in range(0, out.size, BLOCK_ELEMENTS):
            block = slice(start, start + BLOCK_ELEMENTS)
            sum_rows([row[block] for row in rows], out[block], divisor, op)
        return
    dtype = accumulator(out.dtype)
    # No row is read after `out` is written, which may be that row.
    total = cast(rows[0], dtype)
    for row in rows[1:-1]:
        total = op(total, cast(row, dtype))
    if len(rows) > 1:
        last = cast(rows[-1], dtype)
        if out.dtype == dtype:
            total = op(total, last, out=out)
            if divisor == 1:
                return
        else:
            total = op(total, last)
    divide_into(total, divisor, out)


def combine_into(total: np.ndarray, term: np.ndarray, op: np.ufunc = np.add) -> None:
    """Add ``term``, which may be narrower, to ``total``; or take the maximum or minimum."""
    for start in range(0, total.size, BLOCK_ELEMENTS):
        block = slice(start, start + BLOCK_ELEMENTS)
        op(total[block], cast(term[block], total.dtype), out=total[block])


def divide_into(total: np.ndarray, divisor: int, out: np.ndarray) -> None:
    """Write ``total / divisor``, rounded once, into ``out``, which may be ``total``."""
    if divisor == 1:
        cast_into(total, out)
        return
    if total.dtype.kind == "c":  # part by part, since (inf + 0j) / 2 has a NaN
        total = _parts(total)
        out = _parts(out)
    if math.frexp(divisor)[0] == 0.5:  # a power of two: exact, and faster
        scale: np.ufunc = np.multiply
        factor = 1 / divisor
    else:
        scale = np.divide
        factor = float(divisor)
    if out.dtype == total.dtype:
        scale(total, factor, out=out)
    else:
        cast_into(scale(total, factor), out)


def _parts(numbers: np.ndarray) -> np.ndarray:
    """Return a view of complex numbers as twice as many real ones."""
    return numbers.view(numbers.real.dtype)
