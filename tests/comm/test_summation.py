"""Sums in rank order: exact where they can be, within rounding elsewhere."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from chainermn_comm.numbers.summation import sum_rows


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_sum_is_no_product(ranks):
    """Of inf + 0j and 1 the imaginary part would be no number."""
    rows = [np.array([complex(np.inf, 0), 1 + 2j]) for _ in range(ranks)]
    with np.errstate(all="ignore"):
        sum_rows(rows, rows[-1])
    np.testing.assert_array_equal(rows[-1], [complex(np.inf, 0), ranks * (1 + 2j)])


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("divisor", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8"])
def test_the_result_may_be_written_over_any_row(ranks, divisor, dtype):
    rows = np.random.default_rng(ranks).standard_normal((ranks, 70_000)).astype(dtype)
    wide = rows.astype("f4" if dtype == "f2" else dtype)
    total = reduce(np.add, wide)
    # Complex numbers are divided part by part.
    mean = total.view(total.real.dtype) / divisor
    expected = mean.view(total.dtype).astype(dtype)
    for place in range(ranks):
        copies = list(rows.copy())
        sum_rows(copies, copies[place], divisor)
        np.testing.assert_array_equal(copies[place], expected)


def test_the_largest_numbers_of_16_bits_have_a_mean():
    largest = np.full((8, 9), np.finfo("f2").max)
    sum_rows(list(largest), largest[0], 8)
    np.testing.assert_array_equal(largest[0], largest[1])
