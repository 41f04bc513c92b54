"""The values that arrays are filled with, so that wrong ones are noticed."""

import numpy as np
import pytest

from chainermn_tools.bench import values

SIZE = 300_000  # more than one piece


def filled(rank: int, size: int = SIZE) -> np.ndarray:
    array = np.empty(size, np.float32)
    values.fill_pattern(array, rank)
    return array


@pytest.mark.parametrize("size", [1, SIZE])
def test_right_values_are_right(size):
    arrays = [filled(rank, size) for rank in range(3)]
    assert values.matches_pattern(arrays[2], size, plus=2)
    assert values.matches_pattern(sum(arrays), size, times=3, plus=3)
    assert values.matches_pattern(np.mean(arrays, 0), size, plus=1)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (-1, -1.0),
        (7, np.nan),
        (slice(65536, 131072), filled(0)[:65536]),  # a chunk of the one before
    ],
    ids=["last", "nan", "chunk"],
)
def test_a_wrong_value_is_noticed(place, value):
    array = filled(0)
    array[place] = value
    assert not values.matches_pattern(array, SIZE)


def test_values_of_another_rank_kind_or_number_are_wrong():
    wrong = [filled(1), filled(0)[:-1], filled(0).astype("f8"), [0.0], None]
    assert not any(values.matches_pattern(array, SIZE) for array in wrong)
