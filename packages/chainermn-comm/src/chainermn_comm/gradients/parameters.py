"""A model's parameters by name, and the arrays that they may have."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from ..gpu import devices
from ..numbers import as_array, can_be_summed


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
    """Return the array; raise TypeError unless it is None or has floats, in NumPy or CuPy."""
    if array is None:
        return None
    if devices.on_gpu(array):
        if array.dtype.kind != "f":
            raise TypeError(
                f"rank {rank}: parameter {name} has dtype {array.dtype}; on a GPU it must be a "
                "float16, float32 or float64"
            )
        return array
    array = as_array(array, rank)
    if array.dtype.kind in "biu" or not can_be_summed(array.dtype):
        raise TypeError(
            f"rank {rank}: parameter {name} has dtype {array.dtype}, expected a float"
        )
    return array
