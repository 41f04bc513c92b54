"""Memory for arrays, and arrays as bytes."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

HUGE_PAGE_BYTES = 2 << 20


def empty(
    shape: tuple[int, ...], dtype: Any, order: Literal["C", "F"] = "C"
) -> np.ndarray:
    """Do as numpy.empty; a large array lies on huge pages, which fill faster.

    A large array doesn't own its memory, so it can't be resized in place.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < 2 * HUGE_PAGE_BYTES:
        return np.empty(shape, dtype, order)
    memory = np.empty(nbytes + HUGE_PAGE_BYTES, np.uint8)
    return np.ndarray(
        shape, dtype, memory, -memory.ctypes.data % HUGE_PAGE_BYTES, None, order
    )


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return the memory of a C- or Fortran-contiguous array as 1-D uint8, not copied."""
    if array.nbytes == 0:
        return np.empty(0, np.uint8)
    if not array.flags.c_contiguous:
        array = array.T
    if array.ndim != 1:
        array = array.reshape(-1)
    return array.view(np.uint8)
