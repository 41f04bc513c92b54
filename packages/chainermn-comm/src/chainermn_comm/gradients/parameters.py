"""A model's parameters and gradients as arrays: which exist, and which may be overwritten."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import numpy as np

from ..gpu import devices
from ..numbers import as_array, can_be_summed

# Bits of `numpy.ndarray.flags.num`: C-contiguous, writeable, in memory of its own.
OWN_MEMORY = 0x1 | 0x400 | 0x4


def named(model: Any, rank: int) -> list[tuple[str, Any]]:
    """Return the model's parameters with their names, sorted by name."""
    try:
        namedparams = model.namedparams
    except AttributeError:
        raise TypeError(
            f"rank {rank}: expected a model with namedparams(), such as a chainer.Link; got "
            f"{type(model).__name__}"
        ) from None
    return sorted(namedparams(), key=itemgetter(0))


def checked(array: Any, name: str, rank: int) -> Any:
    """Return the array if it is None, or of floats and NumPy's or CuPy's; else raise TypeError."""
    if array is None or (type(array) is np.ndarray and array.dtype.kind in "fc"):
        return array
    if devices.on_gpu(array):
        if array.dtype.kind != "f":
            raise TypeError(
                f"rank {rank}: parameter {name} has dtype {array.dtype}; on a GPU it must be a "
                "float16, float32 or float64"
            )
        return array
    array = as_array(array, rank)
    if array.dtype.kind in "biuSUmM" or not can_be_summed(array.dtype):
        raise TypeError(
            f"rank {rank}: parameter {name} has dtype {array.dtype}, expected a float"
        )
    return array


def own_memory(grads: list[Any]) -> list[bool]:
    """Return for each gradient whether a result may be written into it.

    Chainer makes gradients that are read-only, of stride 0, transposed, or shared
    between parameters; those have to be replaced.
    """
    are_apart = len(set(map(id, grads))) == len(grads)
    if are_apart and all([_owns_memory(grad) for grad in grads]):  # nearly always
        return [True] * len(grads)
    usable = []
    for grad in grads:
        # All arrays of CuPy are writeable, and lack the flag.
        is_writeable = getattr(grad.flags, "writeable", True)
        usable.append(is_writeable and grad.flags.c_contiguous)
    _exclude_overlapping(grads, usable)
    return usable


def _owns_memory(array: Any) -> bool:
    """Return whether this is an array of NumPy's that a result may overwrite.

    Such arrays overlap only views of their memory. The flags are read as bits, since
    reading them by name takes longer.
    """
    return type(array) is np.ndarray and array.flags.num & OWN_MEMORY == OWN_MEMORY


def _exclude_overlapping(grads: list[Any], usable: list[bool]) -> None:
    spans = []
    for index, grad in enumerate(grads):
        if grad.size:
            start, end = _span(grad)
            spans.append((start, end, index))
    spans.sort()
    reach = -1
    last = -1
    for start, end, index in spans:
        if start < reach:
            usable[index] = usable[last] = False
        if end > reach:
            reach = end
            last = index


def _span(array: Any) -> tuple[int, int]:
    """Return the address of the array's first byte and the one after its last."""
    first = devices.address(array)
    last = first
    for n, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            first += (n - 1) * stride
        else:
            last += (n - 1) * stride
    return first, last + array.itemsize
