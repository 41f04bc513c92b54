"""Sums in rank order: exact where they can be, within rounding elsewhere, no needless overflow."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from chainermn_comm.chunks import cut
from chainermn_comm.summation import sum_rows

DTYPES = st.sampled_from([np.float16, np.float32, np.float64])


@st.composite
def rows_of_floats(draw):
    dtype = np.dtype(draw(DTYPES))
    shape = draw(st.tuples(st.integers(2, 8), st.integers(1, 20)))
    finite = hnp.from_dtype(dtype, allow_nan=False, allow_infinity=False)
    return draw(hnp.arrays(dtype, shape, elements=finite))


@settings(max_examples=200, deadline=None)
@given(rows_of_floats())
def test_the_mean_is_within_rounding_and_never_overflows(rows):
    ranks = len(rows)
    mean = np.empty_like(rows[0])
    with np.errstate(over="raise", invalid="ignore"):
        sum_rows(list(rows), mean, ranks)
    info = np.finfo(rows.dtype)
    for column, found in zip(rows.T, mean, strict=True):
        terms = [Fraction(float(x)) for x in column]
        exact = sum(terms) / ranks
        bound = Fraction(float(info.eps)) * 2 * ranks * sum(map(abs, terms)) / ranks
        assert np.isfinite(found)
        assert abs(Fraction(float(found)) - exact) <= bound + Fraction(
            float(info.smallest_subnormal)
        )


@settings(max_examples=100, deadline=None)
@given(rows_of_floats())
def test_an_element_has_the_same_bits_whatever_stands_beside_it(rows):
    whole, alone = np.empty_like(rows[0]), np.empty_like(rows[0])
    with np.errstate(over="raise", invalid="ignore"):
        sum_rows(list(rows), whole, len(rows))
        for i in range(rows.shape[1]):
            sum_rows(list(rows[:, i : i + 1]), alone[i : i + 1], len(rows))
    assert whole.tobytes() == alone.tobytes()


@settings(max_examples=100, deadline=None)
@given(
    arrays=st.lists(st.tuples(st.integers(0, 40), st.sampled_from("efd")), max_size=12),
    chunk_bytes=st.integers(1, 200),
)
def test_chunks_cover_each_element_once(arrays, chunk_bytes):
    sizes = tuple(size for size, _ in arrays)
    dtypes = tuple(np.dtype(code) for _, code in arrays)
    found = cut(sizes, dtypes, chunk_bytes)
    elements = [(i, j) for c in found for i, start, stop in c.parts for j in range(start, stop)]
    assert sorted(elements) == [(i, j) for i, size in enumerate(sizes) for j in range(size)]
    for chunk in found:
        assert chunk.size == sum(stop - start for _, start, stop in chunk.parts) > 0
        assert chunk.nbytes <= max(chunk_bytes, chunk.dtype.itemsize)
        assert {dtypes[i] for i, _, _ in chunk.parts} == {chunk.dtype}
        alone = len(chunk.parts) == 1
        assert alone or all((start, stop) == (0, sizes[i]) for i, start, stop in chunk.parts)


def test_packing_and_unpacking_are_inverse():
    flats = [np.arange(5, dtype="f4"), np.arange(5, 8, dtype="f4"), np.zeros(2, "f8")]
    (chunk,) = cut((5, 3), (np.dtype("f4"),) * 2, 100)
    buffer = np.empty(8, "f4")
    chunk.pack(flats, buffer)
    np.testing.assert_array_equal(buffer, np.arange(8))
    chunk.unpack(buffer + 1, flats)
    np.testing.assert_array_equal(np.concatenate(flats[:2]), np.arange(8) + 1)
