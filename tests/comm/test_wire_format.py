"""The power of two by which an array is divided while it travels in 16 bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chainermn_comm.numbers.wire_format import absmax, choose_wire_format

HALF, SINGLE = np.dtype("f2"), np.dtype("f4")


@example(math.nan)
@example(math.inf)
@given(st.floats(0, 2.0**127) | st.just(math.nan) | st.just(math.inf))
def test_what_travels_narrow_fits_and_keeps_small_numbers(bound):
    wire_format = choose_wire_format(bound, HALF)
    if wire_format.dtype == SINGLE:
        assert not bound < 2.0**11
        return
    scale = 2.0**-wire_format.exponent
    assert bound * scale < 2.0**15
    assert bound == 0 or wire_format.exponent == -100 or bound * scale >= 2.0**14
    assert bound == 0 or 2.0**-24 * scale >= 2.0**-20


@pytest.mark.parametrize("code", ["f4", "f8", "c8"])
def test_other_dtypes_travel_as_they_are(code):
    wire = np.dtype(code)
    assert choose_wire_format(1.0, wire).dtype == wire
    assert choose_wire_format(1.0, wire).exponent == 0


@pytest.mark.parametrize("size", [1, 70_000, 200_000])
@pytest.mark.parametrize("place", [0, -1])
def test_the_largest_magnitude_is_found_wherever_it_is(size, place):
    numbers = np.random.default_rng(size).uniform(-1, 1, size).astype("f4")
    for largest in (3.0, -3.0, math.inf, math.nan):
        numbers[place] = largest
        np.testing.assert_equal(absmax(numbers), abs(largest))
    assert absmax(numbers[:0]) == 0
