"""What tests of gradients that leave during backward share: large models, twins, what has left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from chainermn_train import create_multi_node_optimizer
from chainermn_train.optimizers import overlapped_exchange
from tests.support.training.trainers import parameter_bits, same_everywhere

# A layer of WIDTH by WIDTH has more than BUCKET_BYTES.
BATCH, WIDTH, CLASSES = 3, 260, 3
BUCKET_BYTES = 1 << 18


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of a quarter of their size, and models likewise: most of a test's time is theirs."""
    monkeypatch.setattr(overlapped_exchange, "BUCKET_BYTES", BUCKET_BYTES)


class Deep(chainer.Chain):
    """Three layers, each a bucket by itself."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first, self.second = L.Linear(WIDTH, WIDTH), L.Linear(WIDTH, WIDTH)
            self.third, self.last = L.Linear(WIDTH, WIDTH), L.Linear(WIDTH, CLASSES)

    def __call__(self, x: Any) -> Any:
        h = F.tanh(self.second(F.tanh(self.first(x))))
        return F.mean(self.last(F.tanh(self.third(h))) ** 2)


@contextlib.contextmanager
def sending(comm: Any) -> Iterator[list[str]]:
    """The list to which is added how each bucket of gradients leaves this rank."""
    events: list[str] = []
    make = comm.make_reducer

    def make_reducer(*args: Any) -> Any:
        reducer = make(*args)
        add, add_planned = reducer.add, reducer.add_planned

        def after_backward(model: Any) -> None:
            events.append("after backward")
            add(model)

        def planned(model: Any) -> Any:
            events.append("planned")
            return add_planned(model)

        reducer.add, reducer.add_planned = after_backward, planned
        return reducer

    comm.make_reducer = make_reducer
    try:
        yield events
    finally:
        del comm.make_reducer


def batch(rank: int, number: int) -> Any:
    return (
        np.random.RandomState((rank, number))
        .uniform(-1, 1, (BATCH, WIDTH))
        .astype("f4")
    )


class Twins:
    """A model that is trained with overlap, and an equal one without."""

    def __init__(
        self,
        comm: Any,
        make: Callable[[], Any] = Deep,
        actual: Callable[[], Any] = lambda: chainer.optimizers.Adam(0.01),
        **arguments: Any,
    ) -> None:
        """Each rank draws weights of its own; rank 0's count."""
        self.comm, self.number = comm, 0
        self.models, self.optimizers = [], []
        for overlap in True, False:
            np.random.seed(comm.rank)
            model = make()
            optimizer = create_multi_node_optimizer(
                actual(), comm, overlap=overlap, **arguments
            )
            self.models.append(model)
            self.optimizers.append(optimizer.setup(model))

    def update(self, count: int = 1, loss: Any = None) -> None:
        """Both do; `loss` is called with a model and its batch."""
        for _ in range(count):
            self.number += 1
            x = batch(self.comm.rank, self.number)
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                arguments = (model, x) if loss is None else (loss, model, x)
                optimizer.update(*arguments)
            self.assert_equal()

    def each(self, action: Callable[[Any, Any], None]) -> None:
        """Both do."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            action(model, optimizer)

    def assert_equal(self) -> None:
        """Parameters have the same bits, on all ranks, and so have the gradients they moved by."""
        one, other = self.models
        assert parameter_bits(one) == parameter_bits(other)
        assert same_everywhere(self.comm, one)
        assert self.optimizers[0].t == self.optimizers[1].t
        grads = dict(other.namedparams())
        for name, param in one.namedparams():
            np.testing.assert_array_equal(param.grad, grads[name].grad, err_msg=name)

    def finalize(self) -> None:
        self.each(lambda _, optimizer: optimizer.finalize())
