"""Gradients that leave during backward: models, twins, what has left, and marks in a backward."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Chain, Variable
from chainer.optimizers import Adam
from numpy.random import RandomState
from numpy.testing import assert_array_equal

from chainermn_train import create_multi_node_optimizer
from chainermn_train.optimizers import create
from chainermn_train.optimizers.exchanges import buckets
from tests.support.training.trainers import parameter_bits, same_everywhere

# A layer of WIDTH by WIDTH has more than BUCKET_BYTES.
BATCH = 3
WIDTH = 260
CLASSES = 3
BUCKET_BYTES = 1 << 18


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch):
    """Buckets of a quarter of their size, and models likewise: most of a test's time is theirs."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", BUCKET_BYTES)


class Deep(Chain):
    """Three layers, each a bucket by itself."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(WIDTH, WIDTH)
            self.second = L.Linear(WIDTH, WIDTH)
            self.third = L.Linear(WIDTH, WIDTH)
            self.last = L.Linear(WIDTH, CLASSES)

    def __call__(self, x):
        h = F.tanh(self.second(F.tanh(self.first(x))))
        return F.mean(self.last(F.tanh(self.third(h))) ** 2)


@contextmanager
def sending(comm):
    """The list to which is added how each bucket of gradients leaves this rank."""
    events: list[str] = []
    make = comm.make_reducer

    def make_reducer(*args):
        reducer = make(*args)
        add = reducer.add
        add_planned = reducer.add_planned

        def after_backward(model):
            events.append("after backward")
            add(model)

        def planned(model):
            events.append("planned")
            return add_planned(model)

        reducer.add = after_backward
        reducer.add_planned = planned
        return reducer

    comm.make_reducer = make_reducer
    try:
        yield events
    finally:
        del comm.make_reducer


def batch(rank: int, number: int):
    return RandomState((rank, number)).uniform(-1, 1, (BATCH, WIDTH)).astype("f4")


class Twins:
    """A model that is trained with overlap, and an equal one without."""

    def __init__(
        self,
        comm,
        make: Callable[[], Any] = Deep,
        actual: Callable[[], Any] = lambda: Adam(0.01),
        **arguments,
    ):
        """Each rank draws weights of its own; rank 0's count."""
        self.comm = comm
        self.number = 0
        self.models = []
        self.optimizers = []
        for overlap in True, False:
            np.random.seed(comm.rank)
            model = make()
            optimizer = create_multi_node_optimizer(
                actual(), comm, overlap=overlap, **arguments
            )
            self.models.append(model)
            self.optimizers.append(optimizer.setup(model))

    def update(self, count: int = 1, loss=None):
        """Both do; `loss` is called with a model and its batch."""
        for _ in range(count):
            self.number += 1
            x = batch(self.comm.rank, self.number)
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                if loss is None:
                    arguments = (model, x)
                else:
                    arguments = (loss, model, x)
                optimizer.update(*arguments)
            self.assert_equal()

    def each(self, action: Callable[[Any, Any], None]):
        """Both do."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            action(model, optimizer)

    def assert_equal(self):
        """Parameters have the same bits, on all ranks, and so have the gradients they moved by."""
        one, other = self.models
        assert parameter_bits(one) == parameter_bits(other)
        assert same_everywhere(self.comm, one)
        assert self.optimizers[0].t == self.optimizers[1].t
        grads = dict(other.namedparams())
        for name, param in one.namedparams():
            assert_array_equal(param.grad, grads[name].grad, err_msg=name)

    def finalize(self):
        self.each(lambda _, optimizer: optimizer.finalize())


class PlantedError(Exception):
    """What a backward raises."""


class Mark(chainer.FunctionNode):
    """The identity; its backward calls a function, which may raise."""

    def __init__(self, told: Callable[[], Any]):
        self.told = told

    def forward(self, inputs):
        return inputs

    def backward(self, indexes, grad_outputs):
        self.told()
        return grad_outputs


def marked(x, told: Callable[[], Any]) -> Variable:
    if isinstance(x, Variable):
        variable = x
    else:
        variable = Variable(x)
    return Mark(told).apply((variable,))[0]


def raise_planted():
    raise PlantedError


# A double of CuPy's streams and events, and of Chainer's GPUs, that writes down what is done.


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

    def __init__(self):
        self.main: list[str] = []
        self.thread: list[str] = []
        self.event = mock.MagicMock()
        self.stream = mock.MagicMock()
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

        def record_it(*_, **__):
            is_main = threading.current_thread() is threading.main_thread()
            done = self.thread
            if is_main:
                done = self.main
            done.append(what)
            return mock.DEFAULT

        return record_it

    @contextmanager
    def installed(self):
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


@contextmanager
def all_arrays_on_one_gpu():
    """Chainer takes all arrays, which are NumPy's, for those of one GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chainer.backends.cuda.GpuDevice", Device)
        patch.setattr(chainer.backend, "get_device_from_array", lambda *_: Device())
        yield


@contextmanager
def parameters_on_gpus():
    """The optimizer, which is made within, takes all parameters for those on GPUs."""
    with pytest.MonkeyPatch.context() as patch, Streams().installed():
        patch.setattr(create, "has_gpus", True)
        yield
