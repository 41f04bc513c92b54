"""The exponent that a block of numbers has in common while it travels in 16 bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chainermn_comm.allreduce.wire_format import heading_of, largest_of, scaled

HALF, SINGLE = np.dtype("f2"), np.dtype("f4")


@example(math.nan)
@example(math.inf)
@given(st.floats(0, 2.0**127) | st.just(math.nan) | st.just(math.inf))
def test_what_travels_narrow_fits_and_keeps_small_numbers(largest):
    with np.errstate(over="ignore"):
        largest = float(np.float32(largest))
    heading = heading_of(largest, 0, HALF)
    if heading.dtype == SINGLE:
        assert not largest < 2.0**11
        return
    shifted = np.empty(2, SINGLE)
    scaled(np.array([largest, 2.0**-24], SINGLE), -heading.exponent, shifted)
    assert shifted[0] < 2.0**15
    assert largest == 0 or heading.exponent == -100 or shifted[0] >= 2.0**14
    if largest > 0:
        assert shifted[1] >= 2.0**-20


@pytest.mark.parametrize("code", ["f4", "f8", "c8"])
def test_other_dtypes_travel_as_they_are(code):
    wire = np.dtype(code)
    assert largest_of(np.ones(3, wire), wire) == 0
    assert heading_of(0.0, 2, wire).dtype == wire
    assert heading_of(0.0, 2, wire).exponent == 2
