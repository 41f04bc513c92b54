"""What exchanges need to know of GPUs: who has its arrays there, and a stream for a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import chainer
from chainer.backends import cuda

from .parameter_set import ParameterSet


def are_on_gpus(params: ParameterSet) -> bool:
    """Return whether some parameter is on a GPU, or will be when it is initialised."""
    found = [
        device_of(param.array) if param.is_initialized else param.device for param in params.params
    ]
    return any(isinstance(device, cuda.GpuDevice) for device in found)


def device_of(array: Any) -> Any:
    """Return the GPU that holds an array; None for any other array, and for None."""
    device = None if array is None else chainer.backend.get_device_from_array(array)
    return device if isinstance(device, cuda.GpuDevice) else None


def recorded_event(device: Any) -> Any:
    """Return an event that happens after the work that this thread has asked a GPU for so far."""
    with chainer.using_device(device):
        event = cuda.cupy.cuda.Event(block=True, disable_timing=True)
        event.record()
    return event


@contextlib.contextmanager
def own_stream(device: Any, after: Any = None) -> Iterator[None]:
    """Use a stream that comes after an event; wait for the stream at the end.

    Without a GPU, if ``device`` is None, this does nothing.
    """
    if device is None:
        yield
        return
    with chainer.using_device(device):
        stream = cuda.cupy.cuda.Stream(non_blocking=True)
        with stream:
            if after is not None:
                stream.wait_event(after)
            yield
            stream.synchronize()
