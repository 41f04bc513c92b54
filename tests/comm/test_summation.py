"""Sums in rank order: exact where they can be, within rounding elsewhere."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from chainermn_comm.numbers.summation import combine_into, sum_rows


@st.composite
def rows_of_floats(draw):
    dtype = np.dtype(draw(st.sampled_from("efd")))
    shape = draw(st.tuples(st.integers(2, 8), st.integers(1, 20)))
    most = float(np.finfo(dtype).max) / (1 if dtype == np.float16 else 8)
    finite = hnp.from_dtype(dtype, min_value=-most, max_value=most)
    return draw(hnp.arrays(dtype, shape, elements=finite))


@settings(max_examples=200)
@given(rows_of_floats())
def test_the_mean_is_within_rounding(rows):
    ranks = len(rows)
    mean = np.empty_like(rows[0])
    sum_rows(list(rows), mean, ranks)
    info = np.finfo(rows.dtype)
    for column, found in zip(rows.T, mean, strict=True):
        terms = [Fraction(float(x)) for x in column]
        exact = sum(terms) / ranks
        bound = Fraction(float(info.eps)) * 2 * sum(map(abs, terms))
        bound += Fraction(float(info.smallest_subnormal))
        assert np.isfinite(found)
        assert abs(Fraction(float(found)) - exact) <= bound


@settings(max_examples=100)
@given(rows_of_floats())
def test_an_element_has_the_same_bits_whatever_stands_beside_it(rows):
    whole, alone = np.empty_like(rows[0]), np.empty_like(rows[0])
    sum_rows(list(rows), whole, len(rows))
    for i in range(rows.shape[1]):
        sum_rows(list(rows[:, i : i + 1]), alone[i : i + 1], len(rows))
    assert whole.tobytes() == alone.tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_sum_is_no_product(ranks, in_place):
    """Of inf + 0j and 1 the imaginary part would be no number."""
    rows = np.array([[complex(np.inf, 0), 1 + 2j]] * ranks)
    out = rows[-1] if in_place else np.empty(2, complex)
    with np.errstate(all="ignore"):
        sum_rows(list(rows), out)
    np.testing.assert_array_equal(out, [complex(np.inf, 0), ranks * (1 + 2j)])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("divisor", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["f2", "f4", "c8"])
def test_the_result_may_be_written_over_any_row(ranks, divisor, dtype):
    drawn = np.random.default_rng(ranks).standard_normal((ranks, 70_000))
    rows = drawn.astype(dtype)
    apart = np.empty_like(rows[0])
    sum_rows(list(rows), apart, divisor)
    for place in range(ranks):
        copies = list(rows.copy())
        sum_rows(copies, copies[place], divisor)
        np.testing.assert_array_equal(copies[place], apart)


@pytest.mark.parametrize(("total", "term"), [("f4", "f2"), ("f4", "f4"), ("f8", "f4")])
@pytest.mark.parametrize("op", [np.add, np.maximum])
def test_a_narrower_term_is_combined_with_a_total(total, term, op):
    sums, terms = np.random.default_rng(3).standard_normal((2, 70_000))
    sums, terms = sums.astype(total), terms.astype(term)
    expected = op(sums, terms.astype(total))
    combine_into(sums, terms, op)
    np.testing.assert_array_equal(sums, expected)
