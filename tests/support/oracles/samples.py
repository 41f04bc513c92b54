"""Arrays that every rank can compute for every rank, and what makes two values the same."""

from __future__ import annotations

import numpy as np
from numpy.testing import assert_array_equal

DTYPES = [
    *("float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint64", "bool", "complex64", "complex128"),
]


def view_transposed(array):
    return array.reshape(2, 3, 4).transpose(2, 0, 1)


def view_reversed(array):
    return array[::-1, ::-1]


def view_0_d(array):
    return np.array(array[1, 1])


def view_broadcast(array):
    return np.broadcast_to(array[0], (3, 6))


VIEWS = {
    "C": np.ascontiguousarray,
    "F": np.asfortranarray,
    "slice": lambda array: array[1:, ::2],
    "transposed": view_transposed,
    "reversed": view_reversed,
    "0-d": view_0_d,
    "empty": lambda array: array[:0],
    "read-only": np.ascontiguousarray,
    "broadcast": view_broadcast,
}
LAYOUTS = list(VIEWS)


def sample(rank: int, dtype: str, layout: str = "C") -> np.ndarray:
    """The array of one rank; small whole numbers, so sums are exact in every dtype."""
    values = (np.arange(24).reshape(4, 6) % 5 + rank) % 7
    array = values.astype(dtype)
    if array.dtype.kind == "c":
        array += (1j * values[::-1]).astype(dtype)
    array.flags.writeable = layout != "read-only"
    return VIEWS[layout](array)


def same(actual: np.ndarray, expected: np.ndarray):
    """Assert that arrays are equal in type, dtype, shape and every element."""
    assert isinstance(actual, np.ndarray)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert_array_equal(actual, expected)


def alike(one, other) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            alike(one[key], other[key]) for key in one
        )
    if isinstance(one, np.ndarray):
        if one.dtype == object:
            bits = np.ndarray.tolist
        else:
            bits = np.ndarray.tobytes
        return (one.dtype, one.shape) == (other.dtype, other.shape) and bits(
            one
        ) == bits(other)
    return bool(one == other)
