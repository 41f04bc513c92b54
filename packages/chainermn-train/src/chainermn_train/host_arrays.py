"""Values in host memory, without Chainer's graphs, as they are sent to other ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from chainer import Variable
from chainer.backends import cuda


def to_host(value: Any) -> Any:
    """Return ``value`` with its variables and GPU arrays as NumPy arrays; it may be nested."""
    if isinstance(value, Variable):
        value = value.array
    if isinstance(value, cuda.ndarray):
        return cuda.to_cpu(value)
    if type(value) in (list, tuple):
        return type(value)(map(to_host, value))
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a named tuple
        return value._make(map(to_host, value))
    if type(value) is dict:
        return {key: to_host(each) for key, each in value.items()}
    return value


def as_number(key: str, value: Any, reporter: str) -> Any:
    """Return a number or array in float64 or wider on the host; TypeError for anything else."""
    array = np.asarray(to_host(value))
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"{reporter} reports {key!r} as {type(value).__name__}, which has no mean over ranks"
        )
    array = array.astype(np.result_type(array.dtype, np.float64))
    return array.item() if array.ndim == 0 else array
