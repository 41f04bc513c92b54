"""The exponent that a block of numbers has in common while it travels in 16 bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chainermn_comm.numbers.wire_format import absmax, choose_wire_format, ldexp_into

HALF, SINGLE = np.dtype("f2"), np.dtype("f4")


@example(math.nan)
@example(math.inf)
@given(st.floats(0, 2.0**127) | st.just(math.nan) | st.just(math.inf))
def test_what_travels_narrow_fits_and_keeps_small_numbers(largest):
    with np.errstate(over="ignore"):
        largest = float(np.float32(largest))
    wire_format = choose_wire_format(largest, 0, HALF)
    if wire_format.dtype == SINGLE:
        assert not largest < 2.0**11
        return
    shifted = np.empty(2, SINGLE)
    ldexp_into(np.array([largest, 2.0**-24], SINGLE), -wire_format.exponent, shifted)
    assert shifted[0] < 2.0**15
    assert largest == 0 or wire_format.exponent == -100 or shifted[0] >= 2.0**14
    if largest > 0:
        assert shifted[1] >= 2.0**-20


@pytest.mark.parametrize("code", ["f4", "f8", "c8"])
def test_other_dtypes_travel_as_they_are(code):
    wire = np.dtype(code)
    assert absmax(np.ones(3, wire), wire) == 0
    assert choose_wire_format(0.0, 2, wire).dtype == wire
    assert choose_wire_format(0.0, 2, wire).exponent == 2
