"""Arrays of a class that Chainer mixes with no other in one function, as those of CuPy."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import chainer
import numpy as np
import pytest
from chainer.backends import cuda

from chainermn_modelparallel.functions import (
    control_dependencies,
    ordered_function,
)


class Device(np.ndarray):
    """Stands in for CuPy's class."""


def zeros(*arguments):
    return np.zeros(*arguments).view(Device)


def empty(*arguments):
    return np.empty(*arguments).view(Device)


MODULE = SimpleNamespace(
    zeros=zeros,
    empty=empty,
    empty_like=np.empty_like,  # of the class of what it is given
)


def _array_module(*arrays):
    if any(isinstance(array, Device) for array in arrays):
        return MODULE
    return np


@contextmanager
def received_on_devices(comm):
    """What this rank receives of `comm` is on its device."""
    original = comm.recv_with_metadata

    def on_device(source: int, tag: int = 0, label: str = ""):
        metadata, arrays = original(source, tag, label)
        return metadata, tuple(array.view(Device) for array in arrays)

    def compatible(arrays) -> bool:
        return len({isinstance(a, Device) for a in arrays if a is not None}) < 2

    ours = SimpleNamespace(
        get_array_module=_array_module,
        get_device_from_array=chainer.backend.get_device_from_array,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "ndarray", Device)
        patch.setattr(cuda.GpuDevice, "from_array", staticmethod(lambda array: None))
        patch.setattr(chainer, "is_arrays_compatible", compatible)
        for module in (ordered_function, control_dependencies):
            patch.setattr(module, "backend", ours)
        patch.setattr(comm, "recv_with_metadata", on_device)
        yield
