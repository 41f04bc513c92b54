"""A training of a rank with state in every place that has one, and a digest of that state."""

from __future__ import annotations

import hashlib
import random

import chainer
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions

from chainermn_train import create_multi_node_optimizer
from chainermn_train.checkpoint.state_dict import state_dict


class Model(chainer.Chain):
    """Its loss draws from NumPy's generator and from Python's."""

    def __init__(self, inputs: int | None = None) -> None:
        super().__init__()
        with self.init_scope():
            self.hidden = L.Linear(inputs, 8)
            self.norm = L.BatchNormalization(8)
            self.out = L.Linear(8, 1)

    def forward(self, x, y):
        h = chainer.functions.dropout(self.norm(self.hidden(x)), 0.3)
        loss = chainer.functions.mean_squared_error(self.out(h), y) * (
            1 + random.random()
        )
        chainer.report({"loss": loss}, self)
        return loss


def shuffled(dataset):
    return chainer.iterators.SerialIterator(dataset, 4)


def make_trainer(comm, out, stop, model=None, iterate=shuffled):
    """A trainer of this rank's examples, with state in every place that has one."""
    random.seed(comm.rank)
    np.random.seed(comm.rank)
    x = np.random.uniform(size=(10, 4)).astype("f4")
    dataset = chainer.datasets.TupleDataset(x, x.sum(axis=1, keepdims=True))
    optimizer = create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
    updater = training.StandardUpdater(
        iterate(dataset), optimizer.setup(model or Model())
    )
    trainer = training.Trainer(updater, (stop, "iteration"), out=str(out))
    trainer.extend(extensions.ExponentialShift("alpha", 0.9), trigger=(2, "iteration"))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport(trigger=(4, "iteration")))
    return trainer


def digest(updater) -> str:
    """Of parameters, statistics, the optimizer's and the iterator's state, and generators."""
    state = {
        **state_dict(updater),
        "random": np.array([random.random(), np.random.uniform()]),
    }
    found = hashlib.sha256()
    for name, array in sorted(state.items()):
        found.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()
