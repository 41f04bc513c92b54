"""What exchanges need of a GPU: which it is, and a stream for a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import chainer
from chainer.backends import cuda

from chainermn_comm import CommunicationError
from chainermn_comm.gpu import devices, staging


def device_of(array: Any) -> Any:
    """Return the GPU that holds an array; None for any other array, and for None."""
    device = None if array is None else chainer.backend.get_device_from_array(array)
    return device if isinstance(device, cuda.GpuDevice) else None


def new_stream(device: Any) -> Any:
    """Return a stream of a GPU; None without one. CommunicationError where CUDA fails."""
    return _call_on(device, "making a stream", devices.new_stream)


def recorded_event(device: Any) -> Any:
    """Return an event that happens after the work that this thread has asked a GPU for so far."""
    return _call_on(device, "recording an event", devices.recorded_event)


def wait_on_device(device: Any, stream: Any) -> None:
    """Let this thread's current stream wait for what a stream was given; the host doesn't."""

    def wait() -> None:
        devices.current_stream().wait_event(devices.recorded_event(stream))

    _call_on(device, "waiting for a stream", wait)


@contextlib.contextmanager
def using_stream(
    device: Any, stream: Any, after: Any = None, wait: bool = True
) -> Iterator[None]:
    """Use a stream, which comes after an event; ``wait`` for the stream at the end.

    Without a GPU, if ``device`` is None, this does nothing. Where CUDA fails at the
    beginning, that is raised at the end: the other ranks wait for what this one does
    with them inside.
    """
    failure = None
    with contextlib.ExitStack() as stack:
        if device is not None:
            try:
                with _translated_errors("using a stream"):
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
            with _translated_errors("waiting for a stream"):
                staging.wait([devices.recorded_event()])


def _call_on(device: Any, what: str, function: Callable[[], Any]) -> Any:
    if device is None:
        return None
    with _translated_errors(what), chainer.using_device(device):
        return function()


def _translated_errors(what: str) -> AbstractContextManager[None]:
    return devices.translated_errors(f"exchanging gradients on a GPU: {what}")
