"""The arrays and integers that users may pass, and the errors for everything else."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from .dtypes import OPERATIONS, can_be_summed


def check_operation(
    rank: int, operation: str, op: Any, arrays: Sequence[Any], mean: bool = False
) -> None:
    """Raise ValueError or TypeError unless ``op``, or a mean, can be taken of these arrays."""
    if not isinstance(op, str) or op not in OPERATIONS:
        known = ", ".join(OPERATIONS)
        raise ValueError(
            f"rank {rank}: op of {operation} must be one of {known}, got {op!r}"
        )
    for array in arrays:
        if not can_be_summed(array.dtype) or (op != "sum" and array.dtype.kind == "c"):
            raise TypeError(
                f"rank {rank}: {operation} can't take the {op} of dtype {array.dtype}"
            )
        if mean and array.dtype.kind in "biu":
            raise TypeError(f"rank {rank}: {operation} takes floats, got {array.dtype}")


def as_array(data: Any, rank: int) -> np.ndarray:
    """Return a user's array or scalar as a NumPy array; raise TypeError for anything else."""
    if not isinstance(data, (np.ndarray, np.generic, bool, int, float, complex)):
        if hasattr(data, "__cuda_array_interface__"):
            raise TypeError(
                f"rank {rank}: of GPU arrays only CuPy's can be sent, got "
                f"{type(data).__module__}.{type(data).__name__}; convert it (cupy.asarray)"
            )
        raise TypeError(
            f"rank {rank}: expected an array, a scalar, or a tuple or list of them, got "
            f"{type(data).__name__}; objects go through the method that ends in _obj"
        )
    if isinstance(data, np.ma.MaskedArray):
        raise TypeError(
            f"rank {rank}: a masked array would lose its mask; send its data and mask as a tuple, "
            "or itself with the method that ends in _obj"
        )
    array = np.asarray(data)
    if array.dtype.hasobject:
        raise TypeError(
            f"rank {rank}: an array of dtype {array.dtype} holds Python objects; send it with "
            "the method that ends in _obj"
        )
    return array


def as_integer(value: Any) -> int | None:
    """Return an integer of Python or NumPy as an int; None if the value is no integer."""
    if isinstance(value, bool):  # a mistake for a rank, tag or color
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def integer_between(value: Any, least: int, most: int, what: str) -> int:
    """Return ``value`` as an int; raise ValueError, which names ``what``, if it isn't in range."""
    number = as_integer(value)
    if number is None or not least <= number <= most:
        raise ValueError(
            f"{what} must be an integer from {least} to {most}, got {value!r}"
        )
    return number


def wrong_kind(what: str, value: Any, rank: int) -> TypeError:
    """Return the TypeError for a ``value`` of a wrong type."""
    return TypeError(f"rank {rank}: {what}, got {type(value).__name__}")


def one_for_each(values: Any, rank: int, size: int) -> list[Any]:
    """Return a user's values as a list; raise unless there is one value for each rank."""
    is_row = hasattr(values, "__getitem__") and getattr(values, "ndim", 1) > 0
    expected = f"rank {rank}: expected a tuple or list of {size} values, one for each rank, got"
    if isinstance(values, dict) or not is_row:
        raise TypeError(f"{expected} {type(values).__name__}")
    if len(values) != size:
        raise ValueError(f"{expected} {len(values)}")
    return list(values)
