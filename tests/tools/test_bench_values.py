"""The values that arrays are filled with, so that wrong ones are noticed."""

import numpy as np
import pytest

from chainermn_tools.bench import values


def filled(size: int, rank: int = 0) -> np.ndarray:
    array = np.empty(size, np.float32)
    values.fill_pattern(array, rank)
    return array


@pytest.mark.parametrize("size", [1, 1000, 262_397, 300_000])
def test_right_values_are_right(size):
    arrays = [filled(size, rank) for rank in range(3)]
    assert values.matches_pattern(arrays[2], size, plus=2)
    assert values.matches_pattern(sum(arrays), size, times=3, plus=3)
    assert values.matches_pattern(np.mean(arrays, 0), size, plus=1)


def test_wrong_values_are_wrong():
    size = 300_000
    right = filled(size)
    one = right.copy()
    one[-1] += 1
    late = right.copy()
    late[65536:131072] = right[:65536]  # a chunk of the one before
    nan = right.copy()
    nan[7] = np.nan
    wrong = [one, late, nan, right[:-1], right.astype("f8"), list(right[:3]), None]
    assert not any(values.matches_pattern(array, size) for array in wrong)
    assert not values.matches_pattern(right, size, plus=1)
    assert not values.matches_pattern(filled(size, 1), size)
