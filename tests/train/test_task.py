"""The thread beside the training, and the stream on which it uses a GPU's gradients."""

from __future__ import annotations

import contextlib
import sys
import threading
from types import SimpleNamespace

import chainer
import numpy as np
import pytest

from chainermn_train import double_buffering
from chainermn_train.double_buffering import DoubleBuffer
from chainermn_train.held import Held, HeldGradients
from chainermn_train.task import Task

from .conftest import make


def test_a_task_hands_over_its_error_and_restores_the_interval():
    interval, go = sys.getswitchinterval(), threading.Event()

    def work(hurry):
        go.wait(60)
        assert hurry.wait(60)
        raise ValueError("planted")

    tasks = [Task(work), Task(work)]
    assert sys.getswitchinterval() < interval
    go.set()
    for task in tasks:
        assert str(task.wait()) == str(task.wait()) == "planted"
    assert sys.getswitchinterval() == interval


def test_a_task_without_a_thread_is_done_at_once():
    done = []
    task = Task(lambda hurry: done.append((hurry.is_set(), threading.current_thread())), False)
    assert done == [(True, threading.main_thread())]
    assert task.wait() is None


def test_waiting_gives_up_after_its_time():
    go = threading.Event()

    def wait(_: threading.Event) -> None:
        go.wait(60)

    task = Task(wait)
    assert task.wait(0.01) is None
    assert task._thread.is_alive()
    go.set()
    task.wait()
    assert not task._thread.is_alive()


@pytest.mark.world
def test_on_a_gpu_the_exchange_comes_after_the_gradients_on_a_stream_of_its_own(monkeypatch, world):
    """A double of CuPy writes down who does what in which order."""
    log = []

    def note(what):
        log.append((threading.current_thread() is threading.main_thread(), what))

    class Device:
        pass

    class Event:
        def __init__(self, **_):
            note("event made")

        def record(self):
            note("recorded")

    class Stream:
        def __init__(self, non_blocking):
            assert non_blocking

        def __enter__(self):
            note("stream entered")

        def __exit__(self, *_):
            note("stream left")

        def wait_event(self, event):
            assert isinstance(event, Event)
            note("stream waits for event")

        def synchronize(self):
            note("stream done")

    @contextlib.contextmanager
    def using_device(device):
        assert isinstance(device, Device)
        note("device")
        yield

    cupy = SimpleNamespace(cuda=SimpleNamespace(Event=Event, Stream=Stream))
    monkeypatch.setattr(double_buffering, "cuda", SimpleNamespace(GpuDevice=Device, cupy=cupy))
    monkeypatch.setattr(chainer.backend, "get_device_from_array", lambda *_: Device())
    monkeypatch.setattr(chainer, "using_device", using_device)
    with make("naive", world) as comm:
        buffer = DoubleBuffer(comm, True)
        ones = np.full(3, comm.rank, np.float32)
        buffer.start(HeldGradients({"/w": Held(np.zeros(3, np.float32), ones, None)}))
        assert buffer.wait() is None
        means = buffer.pop()
        assert means is not None
        np.testing.assert_array_equal(means["/w"].grad, np.full(3, (comm.size - 1) / 2))
        buffer.close()
    main = [what for is_main, what in log if is_main]
    thread = [what for is_main, what in log if not is_main]
    assert main == ["device", "event made", "recorded"]
    assert thread == [
        "device",
        "stream entered",
        "stream waits for event",
        "stream done",
        "stream left",
    ]
