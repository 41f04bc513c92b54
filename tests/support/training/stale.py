"""What the tests of double buffering share: a model, and the loop that it must equal."""

from __future__ import annotations

import copy

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.optimizer_hooks import GradientClipping, WeightDecay

from chainermn_train import create_multi_node_optimizer

BATCH, WIDTH = 8, 300


class TanhNet(chainer.Chain):
    """Two layers, with gradients of many kinds: whole, 0-d, transposed, read-only, missing."""

    def __init__(self, seed: int, n_in: int | None = WIDTH, width: int = WIDTH) -> None:
        super().__init__()
        np.random.seed(seed)
        dtype = chainer.get_dtype(map_mixed16=np.float16)
        with self.init_scope():
            self.first = L.Linear(n_in, width)
            self.second = L.Linear(width, 3)
            self.scale = chainer.Parameter(np.ones((), dtype))
            self.unused = chainer.Parameter(np.ones(2, dtype))

    def __call__(self, x):
        h = F.tanh(self.first(x))
        return F.mean(self.second(h) ** 2) * self.scale + F.sum(self.second.b)


def batch_of(*seed: int, width: int = WIDTH) -> np.ndarray:
    """A batch, such as that of a rank and the number of an update."""
    random = np.random.RandomState(seed)
    dtype = chainer.get_dtype(map_mixed16=np.float16)
    return random.uniform(-1, 1, (BATCH, width)).astype(dtype)


def hooked_adam(model):
    optimizer = chainer.optimizers.Adam().setup(model)
    optimizer.add_hook(WeightDecay(1e-3))
    optimizer.add_hook(GradientClipping(0.1))
    return optimizer


def stale_loop(comm, model, optimizer, batches):
    """What double buffering must equal: each step uses the mean gradients of the step before."""
    before = None
    for x in batches:
        model.cleargrads()
        model(x).backward()
        comm.multi_node_mean_grad(model, True)
        now = {name: copy.copy(param.grad) for name, param in model.namedparams()}
        if before is not None:
            for name, param in model.namedparams():
                param.grad = before[name]
            optimizer.update()
        before = now


def buffered(comm, model, make_optimizer=hooked_adam, **kwds):
    return create_multi_node_optimizer(make_optimizer(model), comm, True, **kwds)
