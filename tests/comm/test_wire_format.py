"""The largest magnitude, which decides how an array travels in 16 bits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from chainermn_comm.numbers.wire_format import absmax


@pytest.mark.parametrize("size", [1, 70_000, 200_000])
@pytest.mark.parametrize("place", [0, -1])
def test_the_largest_magnitude_is_found_wherever_it_is(size, place):
    numbers = np.random.default_rng(size).uniform(-1, 1, size).astype("f4")
    for largest in (3.0, -3.0, math.inf, math.nan):
        numbers[place] = largest
        np.testing.assert_equal(absmax(numbers), abs(largest))
    assert absmax(numbers[:0]) == 0
