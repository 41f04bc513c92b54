"""Small models, and updates of them: what tests train where any model will do."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import Chain, Parameter, report
from chainer.optimizer_hooks import GradientClipping, WeightDecay
from chainer.optimizers import SGD, Adam
from numpy.random import RandomState

from chainermn_train import create_multi_node_optimizer

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


class Model(Chain):
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


class ScaledMean(Chain):
    """The mean of its inputs times a parameter that begins as 1; reports it as the loss."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.w = Parameter(np.ones((), np.float32))

    def __call__(self, x):
        w = chainer.functions.broadcast_to(self.w, x.shape)
        loss = chainer.functions.mean(x * w)
        report({"loss": loss}, self)
        return loss


def sgd(comm, model, **kwds):
    return create_multi_node_optimizer(SGD(lr=0.5), comm, **kwds).setup(model)


def update(optimizer, times=1):
    """Make updates, of the same examples each."""
    for _ in range(times):
        optimizer.update(optimizer.target, X)


def bad_batch(x=None):
    """A loss function that fails."""
    raise FloatingPointError("bad batch")


BATCH = 8
WIDTH = 300


class TanhNet(Chain):
    """Two layers, with gradients of many kinds: whole, 0-d, transposed, read-only, missing."""

    def __init__(self, seed: int, n_in: int | None = WIDTH, width: int = WIDTH):
        super().__init__()
        np.random.seed(seed)
        dtype = chainer.get_dtype(map_mixed16=np.float16)
        with self.init_scope():
            self.first = L.Linear(n_in, width)
            self.second = L.Linear(width, 3)
            self.scale = Parameter(np.ones((), dtype))
            self.unused = Parameter(np.ones(2, dtype))

    def __call__(self, x):
        h = F.tanh(self.first(x))
        return F.mean(self.second(h) ** 2) * self.scale + F.sum(self.second.b)


def batch_of(*seed: int, width: int = WIDTH) -> np.ndarray:
    """A batch, such as that of a rank and the number of an update."""
    random = RandomState(seed)
    dtype = chainer.get_dtype(map_mixed16=np.float16)
    return random.uniform(-1, 1, (BATCH, width)).astype(dtype)


def hooked_adam(model):
    optimizer = Adam().setup(model)
    optimizer.add_hook(WeightDecay(1e-3))
    optimizer.add_hook(GradientClipping(0.1))
    return optimizer


def buffered(comm, model, make_optimizer=hooked_adam, **kwds):
    return create_multi_node_optimizer(make_optimizer(model), comm, True, **kwds)
