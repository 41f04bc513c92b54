"""A double of CuPy's streams and events, and of Chainer's GPUs, that writes down what is done."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import chainer
import pytest

from chainermn_train.optimizers import create


class Device(chainer.backend.CpuDevice):
    """Stands in for Chainer's GPU; its arrays are NumPy's."""


class Streams:
    """What was done, in order, in the main thread and in others.

    Attributes:
        main: by the main thread.
        thread: by other ones.
        event: every event.
        stream: every stream.
        make_stream: what makes one.
        using_device: Chainer's function.
    """

    def __init__(self) -> None:
        self.main: list[str] = []
        self.thread: list[str] = []
        self.event, self.stream = mock.MagicMock(), mock.MagicMock()
        self.query = mock.Mock(
            side_effect=self.recording("stream done"), return_value=0
        )
        self.event.record.side_effect = self.recording("recorded")
        self.stream.__enter__.side_effect = self.recording("stream entered")
        self.stream.wait_event.side_effect = self.recording("stream waits for event")
        self.stream.__exit__.side_effect = self.recording("stream left")
        self.make_stream = mock.Mock(return_value=self.stream)
        self.using_device = mock.MagicMock(side_effect=self.recording("device"))

    def recording(self, what: str) -> Callable[..., Any]:
        """A function that writes this down."""

        def record_it(*_: Any, **__: Any) -> Any:
            is_main = threading.current_thread() is threading.main_thread()
            (self.main if is_main else self.thread).append(what)
            return mock.DEFAULT

        return record_it

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """All arrays are on one GPU."""
        cupy = mock.MagicMock()
        cupy.cuda.Event = mock.Mock(
            side_effect=self.recording("event made"), return_value=self.event
        )
        cupy.cuda.Stream = self.make_stream
        cupy.cuda.get_current_stream.return_value = self.stream
        cupy.cuda.runtime.eventQuery = self.query
        with pytest.MonkeyPatch.context() as patch, all_arrays_on_one_gpu():
            patch.setitem(sys.modules, "cupy", cupy)
            patch.setattr(chainer, "using_device", self.using_device)
            yield


@contextlib.contextmanager
def all_arrays_on_one_gpu() -> Iterator[None]:
    """Chainer takes all arrays, which are NumPy's, for those of one GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chainer.backends.cuda.GpuDevice", Device)
        patch.setattr(chainer.backend, "get_device_from_array", lambda *_: Device())
        yield


@contextlib.contextmanager
def parameters_on_gpus() -> Iterator[None]:
    """The optimizer, which is made within, takes all parameters for those on GPUs."""
    with pytest.MonkeyPatch.context() as patch, Streams().installed():
        patch.setattr(create, "has_gpus", True)
        yield
