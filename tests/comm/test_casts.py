"""Conversions between float16 and float32 give NumPy's bits, whatever the numbers."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.random import default_rng
from numpy.testing import assert_array_equal

from chainermn_comm.numbers import casts

EVERY_HALF = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def bits(array):
    """As integers; of what is no number, only that it is none."""
    return np.where(np.isnan(array), 0xFFFF, array.view(f"u{array.itemsize}"))


def check(source, dtype="float16"):
    out = np.empty(source.size, dtype)
    with np.errstate(all="ignore"):
        casts.cast_into(source, out)
        assert_array_equal(bits(out), bits(source.astype(dtype)))


def test_every_float16_becomes_the_float32_that_it_is():
    check(EVERY_HALF, "float32")
    for dtype in ("float16", "float32"):  # others are cast
        check(np.arange(9.0), dtype)


# In units of float32's last place: the numbers themselves, and beside and on the ties
# between.
@pytest.mark.parametrize("offset", [0, 1, -1, 0xFFF, 0x1000, 0x1001, 0x1FFF])
def test_float32_beside_every_float16_is_rounded_to_nearest_even(offset):
    numbers = EVERY_HALF[np.abs(EVERY_HALF) < np.inf].astype("f4")
    numbers[:2] = 2.0**-25, -(2.0**-25)  # ties between zero and the smallest
    check((numbers.view("i4") + np.int32(offset)).view("f4"))


@pytest.mark.parametrize("wire", ["float16", "float32"])
def test_numbers_are_scaled_before_they_are_rounded(wire):
    size = casts.BLOCK_ELEMENTS + 9
    numbers = default_rng(3).standard_normal(size, "f4") * 1e-9
    scaled = np.empty(size, wire)
    casts.cast_into(numbers, scaled, 40)
    assert_array_equal(scaled, (numbers * 2.0**40).astype(wire))
    back = np.empty(size, "f4")
    casts.cast_into(scaled, back, -40)
    assert_array_equal(back, scaled.astype("f4") * 2.0**-40)
