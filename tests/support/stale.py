"""What the tests of double buffering share: a model, and the loop that it must equal."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.optimizer_hooks import GradientClipping, WeightDecay

from chainermn_train import create_multi_node_optimizer

BATCH, WIDTH = 8, 300


class Net(chainer.Chain):
    def __init__(self, seed, n_in: int | None = WIDTH):
        super().__init__()
        np.random.seed(seed)
        with self.init_scope():
            self.first = L.Linear(n_in, WIDTH)
            self.second = L.Linear(WIDTH, 3)
            self.scale = chainer.Parameter(np.ones((), chainer.config.dtype))
            self.unused = chainer.Parameter(np.ones(2, chainer.config.dtype))

    def __call__(self, x):
        h = F.tanh(self.first(x))
        # Gradients of many kinds: whole, 0-d, transposed, read-only.
        return F.mean(self.second(h) ** 2) * self.scale + F.sum(self.second.b)


def batch(rank, number):
    random = np.random.RandomState(1000 * rank + number)
    return random.uniform(-1, 1, (BATCH, WIDTH)).astype(chainer.config.dtype)


def arrays(model):
    return {name: param.array.copy() for name, param in sorted(model.namedparams())}


def assert_same_bits(model, expected):
    mine, others = arrays(model), arrays(expected)
    assert {name: a.tobytes() for name, a in mine.items()} == {
        name: a.tobytes() for name, a in others.items()
    }


def adam(model):
    optimizer = chainer.optimizers.Adam().setup(model)
    optimizer.add_hook(WeightDecay(1e-3))
    optimizer.add_hook(GradientClipping(0.1))
    return optimizer


def stale_loop(comm, model, optimizer, batches, scales=None):
    """What double buffering must equal: each step uses the mean gradients of the step before."""
    before = None
    for number, x in enumerate(batches):
        scale = scales[number] if scales else None
        model.cleargrads()
        model(x).backward(loss_scale=scale)
        comm.multi_node_mean_grad(model, True)
        now = {
            name: None if param.grad is None else param.grad.copy()
            for name, param in model.namedparams()
        }
        if before is not None:
            grads, before_scale = before
            for name, param in model.namedparams():
                param.grad = grads[name]
                param._loss_scale = before_scale
            optimizer.update()
        before = now, scale


def buffered(comm, model, make_optimizer=adam, **kwds):
    return create_multi_node_optimizer(make_optimizer(model), comm, True, **kwds)
