"""The pattern of values that is sent: each value shows its rank and its place."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# A prime, so that a value differs if it lands a multiple of some chunk's size away from
# its place.
PERIOD = 1021
# Small numbers, whose sums over thousands of ranks float32 still holds exactly.
_TILE = np.arange(PERIOD * 257, dtype=np.float32) % PERIOD
# The tolerance for a mean over ranks whose number is no power of two, relative to the
# largest value.
TOLERANCE = 1e-5


def fill_pattern(out: np.ndarray, rank: int) -> None:
    """Write what a rank sends: at each place the place's own number, plus the rank."""
    for part, expected in _pieces(out):
        np.add(expected, np.float32(rank), out=part)


def matches_pattern(
    array: object, size: int, times: float = 1, plus: float = 0
) -> bool:
    """Return whether an array of this size is the pattern ``* times + plus``."""
    if not isinstance(array, np.ndarray):
        return False
    if array.dtype != np.float32 or array.shape != (size,):
        return False
    bound = TOLERANCE * (times * PERIOD + abs(plus))
    for part, numbers in _pieces(array):
        expected = numbers * np.float32(times) + np.float32(plus)
        error = np.abs(part - expected)
        if not (error <= bound).all():  # NaN isn't close to anything, either
            return False
    return True


def _pieces(array: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return the array piece by piece, so that no second array of its size is needed."""
    for start in range(0, array.size, _TILE.size):
        part = array[start : start + _TILE.size]
        yield part, _TILE[: part.size]
