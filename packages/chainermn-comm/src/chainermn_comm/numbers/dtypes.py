"""Which dtypes can be summed over ranks, and in which dtype."""

from __future__ import annotations

import numpy as np

FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
# The operations over ranks, by the names that users give.
OPERATIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def can_be_summed(dtype: np.dtype) -> bool:
    """Return whether the dtype is a number (bool counts; its sum is a logical or)."""
    # NumPy's kind of ml_dtypes' numbers, such as bfloat16, is V, and each of these
    # dtypes has a type of its own.
    if dtype.kind == "V":
        return not issubclass(dtype.type, np.void)
    return dtype.kind in "biufc"


def accumulator(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which arrays of ``dtype`` are summed: float32 or wider for floats."""
    if dtype.itemsize < 4 and dtype.kind in "fV":
        return FLOAT32
    return dtype
