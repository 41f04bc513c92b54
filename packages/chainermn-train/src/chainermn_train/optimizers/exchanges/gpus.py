"""The GPU of gradients, and a stream of it for the thread that exchanges them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import chainer
from chainer.backends import cuda

from chainermn_comm import CommunicationError
from chainermn_comm.gpu import devices, staging


def device_of(arrays: Iterable[Any]) -> Any:
    """Return the GPU that holds the arrays, some of which may be None; None if no GPU does."""
    device = chainer.backend.get_device_from_array(*arrays)
    return device if isinstance(device, cuda.GpuDevice) else None


class ThreadStream:
    """A stream of a GPU, for a thread beside the training; without a GPU it does nothing."""

    def __init__(self, device: Any) -> None:
        """Make a stream of the ``device``, or of None; CommunicationError if CUDA fails."""
        self.device = device
        self._stream = self._call("making a stream", devices.new_stream)

    def recorded_event(self) -> Any:
        """Return an event after the work that this thread has asked the GPU for so far."""
        return self._call("recording an event", devices.recorded_event)

    def join(self) -> None:
        """Let this thread's current stream wait for this stream's work; the host doesn't wait."""
        self._call(
            "waiting for a stream",
            lambda: devices.current_stream().wait_event(
                devices.recorded_event(self._stream)
            ),
        )

    @contextlib.contextmanager
    def using(self, after: Any = None, wait: bool = True) -> Iterator[None]:
        """Use the stream inside, after an event; with ``wait``, wait for it at the end.

        If CUDA fails at the beginning, the error is raised after the block, since the
        other ranks wait for this rank's communication in the block.
        """
        if self.device is None:
            yield
            return
        failure = None
        with chainer.using_device(self.device), self._stream:
            try:
                if after is not None:
                    with _translated_errors("using a stream"):
                        self._stream.wait_event(after)
            except CommunicationError as error:
                failure = error
            yield
            if failure is not None:
                raise failure
            if wait:
                with _translated_errors("waiting for a stream"):
                    staging.wait([devices.recorded_event()])

    def _call(self, what: str, function: Callable[[], Any]) -> Any:
        if self.device is None:
            return None
        with _translated_errors(what), chainer.using_device(self.device):
            return function()


def _translated_errors(what: str) -> AbstractContextManager[None]:
    return devices.translated_errors(f"exchanging gradients on a GPU: {what}")
