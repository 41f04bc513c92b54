"""Compares what examples are made of: their types, dtypes, shapes and bits."""

from __future__ import annotations

from typing import Any

import numpy as np


def alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            alike(one[key], other[key]) for key in one
        )
    if isinstance(one, np.ndarray):
        bits = np.ndarray.tolist if one.dtype == object else np.ndarray.tobytes
        return (one.dtype, one.shape) == (other.dtype, other.shape) and bits(
            one
        ) == bits(other)
    return bool(one == other)
