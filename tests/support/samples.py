"""Arrays that every rank can compute for every rank, in every dtype and memory layout."""

from __future__ import annotations

import numpy as np

DTYPES = [
    *("float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint64", "bool", "complex64", "complex128"),
]
LAYOUTS = ["C", "F", "slice", "transposed", "reversed", "0-d", "empty", "read-only", "broadcast"]


def sample(rank: int, dtype: str, layout: str = "C") -> np.ndarray:
    """The array of one rank; small whole numbers, so sums are exact in every dtype."""
    values = (np.arange(24).reshape(4, 6) % 5 + rank) % 7
    array = values.astype(dtype)
    if array.dtype.kind == "c":
        array += (1j * values[::-1]).astype(dtype)
    if layout == "F":
        return np.asfortranarray(array)
    if layout == "slice":
        return array[1:, ::2]
    if layout == "transposed":
        return array.reshape(2, 3, 4).transpose(2, 0, 1)
    if layout == "reversed":
        return array[::-1, ::-1]
    if layout == "0-d":
        return np.array(array[1, 1])
    if layout == "empty":
        return array[:0]
    if layout == "broadcast":
        return np.broadcast_to(array[0], (3, 6))
    if layout == "read-only":
        array.flags.writeable = False
    return array


def same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Assert that arrays are equal in type, dtype, shape and every element."""
    assert isinstance(actual, np.ndarray)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(actual, expected)
