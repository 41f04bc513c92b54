"""Small models: what tests train where any model will do."""

from __future__ import annotations

import chainer
import chainer.links as L
import numpy as np

from chainermn_train import create_multi_node_optimizer

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


class Model(chainer.Chain):
    """Mean square of a linear map; its weights depend on the rank."""

    def __init__(self, rank, n_in=3):
        super().__init__()
        np.random.seed(rank)
        with self.init_scope():
            self.main = L.Linear(n_in, 2)

    def __call__(self, x):
        y = self.main(x)
        if hasattr(self, "more"):
            y = self.more(y)
        return chainer.functions.mean(y * y)


class ScaledMean(chainer.Chain):
    """The mean of its inputs times a parameter that begins as 1; reports it as the loss."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(np.ones((), np.float32))

    def __call__(self, x):
        loss = chainer.functions.mean(
            x * chainer.functions.broadcast_to(self.w, x.shape)
        )
        chainer.report({"loss": loss}, self)
        return loss


def sgd(comm, model, **kwds):
    return create_multi_node_optimizer(
        chainer.optimizers.SGD(lr=0.5), comm, **kwds
    ).setup(model)


def update(optimizer, times=1):
    """Make updates, of the same examples each."""
    for _ in range(times):
        optimizer.update(optimizer.target, X)


def bad_batch(x=None):
    """A loss function that fails."""
    raise FloatingPointError("bad batch")
