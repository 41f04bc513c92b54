"""Values in host memory without Chainer's graphs, to be sent to other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from chainer import Variable
from chainer.backends import cuda

# Python's own types of numbers; NumPy's float64 is a subclass of float.
_PLAIN = (bool, int, float, complex)


def to_host(value: Any) -> Any:
    """Return ``value`` with its variables and GPU arrays as NumPy arrays; it may be nested."""
    if isinstance(value, Variable):
        value = value.array
    if isinstance(value, cuda.ndarray):
        return cuda.to_cpu(value)
    if type(value) in (list, tuple) or hasattr(value, "_make"):
        make = getattr(value, "_make", type(value))  # of a named tuple
        return make(map(to_host, value))
    if type(value) is dict:
        return {key: to_host(each) for key, each in value.items()}
    return value


def as_number(key: str, value: Any, reporter: str) -> Any:
    """Return a number or array on the host, in its own type; TypeError for anything else.

    A variable becomes a variable on the host, without its graph.
    """
    host = to_host(value)
    if np.asarray(host).dtype.kind not in "biufc":
        raise TypeError(
            f"{reporter} reports {key!r} as {type(value).__name__}, which has no mean over ranks"
        )
    if isinstance(value, Variable):
        return Variable(host, requires_grad=False)
    return host


def mean_of(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the weighted mean of values that :func:`as_number` returned, in their type.

    Python's numbers give a float or complex. NumPy's give a scalar or an array of their
    dtype, or of float64 if their dtype has integers. Variables give a variable. Sums are
    taken in float64 or wider.
    """
    arrays = [np.asarray(to_host(value)) for value in values]
    common = np.result_type(*[array.dtype for array in arrays])
    wide = np.result_type(common, np.float64)
    terms = [
        weight * array.astype(wide)
        for weight, array in zip(weights, arrays, strict=True)
    ]
    mean = np.asarray(sum(terms) / sum(weights))
    if all(type(value) in _PLAIN for value in values):
        return mean.item()
    if common.kind in "fc":
        mean = mean.astype(common)
    if any(isinstance(value, Variable) for value in values):
        return Variable(mean, requires_grad=False)
    return mean[()]
