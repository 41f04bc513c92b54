"""What exchanges need to know of GPUs: who has its arrays there, and a stream for a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import chainer
from chainer.backends import cuda

from chainermn_comm import CommunicationError, devices, staging

from ..parameter_set import ParameterSet


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


class StreamError(CommunicationError):
    """CUDA failed in what a rank does alone, beside a mean that all ranks take: they don't know."""


def new_stream(device: Any) -> Any:
    """Return a stream of a GPU; None without one.

    CommunicationError is raised where CUDA fails, as below.
    """
    if device is None:
        return None
    with _errors_told("making a stream"), chainer.using_device(device):
        return devices.new_stream()


def recorded_event(device: Any) -> Any:
    """Return an event that happens after the work that this thread has asked a GPU for so far."""
    if device is None:
        return None
    with _errors_told("recording an event"), chainer.using_device(device):
        return devices.recorded_event()


@contextlib.contextmanager
def using_stream(device: Any, stream: Any, after: Any = None, wait: bool = True) -> Iterator[None]:
    """Use a stream, which comes after an event; ``wait`` for the stream at the end.

    Without a GPU, if ``device`` is None, this does nothing. Where CUDA fails at the beginning,
    StreamError is raised at the end all the same: the other ranks wait for what this one does with
    them inside.
    """
    failure = None
    with contextlib.ExitStack() as stack:
        if device is not None:
            try:
                with _errors_told("using a stream"):
                    stack.enter_context(chainer.using_device(device))
                    stack.enter_context(stream)
                    if after is not None:
                        stream.wait_event(after)
            except CommunicationError as error:
                failure = error
        yield
        if failure is not None:
            raise failure
        if device is not None and wait:
            with _errors_told("waiting for a stream"):
                staging.wait([devices.recorded_event()])


def wait_on_device(device: Any, stream: Any) -> None:
    """Let this thread's current stream wait for what a stream was given; the host doesn't."""
    if device is None:
        return
    with _errors_told("waiting for a stream"), chainer.using_device(device):
        event = devices.new_event()
        event.record(stream)
        devices.current_stream().wait_event(event)


@contextlib.contextmanager
def _errors_told(what: str) -> Iterator[None]:
    try:
        with devices.errors_told(f"exchanging gradients on a GPU: {what}"):
            yield
    except CommunicationError as error:
        raise StreamError(str(error)) from error
