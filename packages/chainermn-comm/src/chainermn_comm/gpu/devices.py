"""GPU arrays, streams, events, kernels and pinned memory; only this file imports CuPy, late."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import CommunicationError, describe_exception

# Results of cudaEventQuery.
_SUCCESS = 0
_NOT_READY = 600


# Devices.


def unavailable_reason() -> str | None:
    """Return why this process can't use a GPU; None if it can."""
    try:
        cupy = _cupy()
    except ImportError as error:
        return f"CuPy can't be imported ({error})"
    # CUDA's libraries may load on a machine that has no device.
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CUDARuntimeError, whose module loads only with CUDA
        return f"CUDA finds no device ({error})"
    if count == 0:
        return "CUDA finds no device"
    return None


def current_device() -> int:
    """Return the number of the current device, which the user chose."""
    return int(_cupy().cuda.Device().id)


def use(device: int) -> AbstractContextManager[Any]:
    """Return a context manager inside which ``device`` is the current device."""
    context: AbstractContextManager[Any] = _cupy().cuda.Device(device)
    return context


def bus_id() -> str:
    """Return the current device's PCI bus id, which doesn't depend on ``CUDA_VISIBLE_DEVICES``."""
    return str(_cupy().cuda.Device().pci_bus_id)


# Arrays.


def on_gpu(array: Any) -> bool:
    """Return whether this is a CuPy array."""
    if "cupy" not in sys.modules:
        return False
    # The attribute is looked up first: it is fast, and most arrays are NumPy's.
    if not hasattr(type(array), "__cuda_array_interface__"):
        return False
    return isinstance(array, _cupy().ndarray)


def device_of(array: Any) -> Any:
    """Return the number of the device that holds the array; None for an array in host memory."""
    if on_gpu(array):
        return array.device.id
    return None


def using_device_of(array: Any) -> AbstractContextManager[Any]:
    """Return a context manager inside which an array's device, if any, is the current device."""
    if on_gpu(array):
        return use(array.device.id)
    return nullcontext()


def address(array: Any) -> int:
    """Return the address of an array's first element."""
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data)
    return int(array.data.ptr)


def empty(shape: int | tuple[int, ...], dtype: Any = np.uint8, order: str = "C") -> Any:
    """Return an uninitialized array on the current device."""
    return _cupy().empty(shape, dtype, order)


def empty_like(array: Any) -> Any:
    """Return a new array in C order, of the array's kind, shape, dtype and device."""
    with using_device_of(array):
        return _module_of(array).empty(array.shape, array.dtype)


def zeros_like(array: Any) -> Any:
    """Return zeros in C order, of the array's kind, shape, dtype and device."""
    with using_device_of(array):
        return _module_of(array).zeros_like(array, order="C")


def c_ordered(array: Any) -> Any:
    """Return the GPU array if it is contiguous in C order, otherwise a copy in C order."""
    if array.flags.c_contiguous:
        return array
    with using_device_of(array):
        return _cupy().ascontiguousarray(array)


def assign(target: Any, array: Any) -> None:
    """Overwrite a GPU array by another array on its device, on the current stream."""
    with using_device_of(target):
        target[...] = array


def from_host(array: np.ndarray) -> Any:
    """Return a copy on the current device, which is complete in the current stream's order."""
    return _cupy().asarray(array)


def pinned(nbytes: int) -> np.ndarray:
    """Return page-locked host memory, which the device copies asynchronously: (nbytes,) uint8."""
    memory = _cupy().cuda.alloc_pinned_memory(max(nbytes, 1))
    return np.frombuffer(memory, np.uint8, nbytes)


def copy(source: Any, target: Any, stream: Any) -> None:
    """Copy bytes from a GPU array to pinned memory, or back, in the stream's order."""
    runtime = _cupy().cuda.runtime
    kind = runtime.memcpyHostToDevice
    if isinstance(target, np.ndarray):
        kind = runtime.memcpyDeviceToHost
    runtime.memcpyAsync(
        address(target), address(source), source.nbytes, kind, stream.ptr
    )


# Streams and events.


def current_stream() -> Any:
    """Return the current stream, which the user chose."""
    return _cupy().cuda.get_current_stream()


def new_stream() -> Any:
    """Return a non-blocking stream, which waits for other streams only by events."""
    return _cupy().cuda.Stream(non_blocking=True)


def recorded_event(stream: Any = None) -> Any:
    """Return an event after all work that a stream, or the current stream, was given so far."""
    event = _cupy().cuda.Event(disable_timing=True)
    if stream is None:
        stream = current_stream()
    event.record(stream)
    return event


def is_done(event: Any) -> bool:
    """Return whether the work before the event has ended; raise CUDA's error if it has failed.

    After an error, CuPy's own ``done`` returns False for ever.
    """
    runtime = _cupy().cuda.runtime
    status = runtime.eventQuery(event.ptr)
    if status not in (_SUCCESS, _NOT_READY):
        raise runtime.CUDARuntimeError(status)
    return bool(status == _SUCCESS)


# Errors and kernels.


class translated_errors:
    """Raise CommunicationError, with CUDA's or NCCL's message, if either fails inside.

    ``what`` names the failed operation in the message. Other exceptions are unchanged.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        package = type(error).__module__.partition(".")[0]
        if error is not None and package in ("cupy", "cupy_backends"):
            text = f"{self._what} failed: {describe_exception(error)}"
            raise CommunicationError(text) from error


@lru_cache(maxsize=64)
def kernel(source: str, name: str, registers: int) -> Any:
    """Return the compiled kernel: ``kernel(grid, block, arguments)``, on the current stream.

    A thread has at most ``registers`` registers. Pass the same string object as
    ``source`` each time, since the cache finds it without hashing or comparing.
    """
    module = _cupy().RawModule(code=source, options=(f"--maxrregcount={registers}",))
    return module.get_function(name)


def _module_of(array: Any) -> Any:
    if on_gpu(array):
        return _cupy()
    return np


def _cupy() -> Any:
    import cupy

    return cupy
