"""How an array travels in 16 bits, which its largest magnitude decides."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.random import default_rng
from numpy.testing import assert_equal

from chainermn_comm.numbers.wire_format import WireFormat, absmax, choose_wire_format

FLOAT16 = np.dtype("f2")
FLOAT32 = np.dtype("f4")


@pytest.mark.parametrize("size", [1, 70_000, 200_000])
@pytest.mark.parametrize("place", [0, -1])
def test_the_largest_magnitude_is_found_wherever_it_is(size, place):
    numbers = default_rng(size).uniform(-1, 1, size).astype("f4")
    for largest in (3.0, -3.0, math.inf, math.nan):
        numbers[place] = largest
        assert_equal(absmax(numbers), abs(largest))
    assert absmax(numbers[:0]) == 0


@pytest.mark.parametrize(
    ("bound", "dtype", "exponent"),
    [
        (0.0, FLOAT16, 0),
        (1e-40, FLOAT16, -100),
        (1.0, FLOAT16, -14),
        (2047.0, FLOAT16, -4),
        (2048.0, FLOAT32, 0),  # else small numbers would lose precision
        (math.inf, FLOAT32, 0),
        (math.nan, FLOAT32, 0),
    ],
)
def test_sums_are_brought_to_where_float16_has_its_full_precision(
    bound, dtype, exponent
):
    assert choose_wire_format(bound, FLOAT16) == WireFormat(dtype, exponent)
