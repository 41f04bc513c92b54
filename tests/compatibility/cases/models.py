"""What cases make of Chainer: models, updates and runs that are the same each time."""

from __future__ import annotations

import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import Chain, Link, Variable, report, using_config
from chainer.iterators import SerialIterator
from chainer.optimizers import SGD
from chainer.serializers import DictionarySerializer
from chainer.training import StandardUpdater, Trainer


def linear(value: float = 1.0, dtype: type = np.float32) -> L.Linear:
    """3 to 2, all weights and biases of this value."""
    with using_config("dtype", dtype):
        return L.Linear(3, 2, initialW=value, initial_bias=value)


def state(link: Link) -> dict[str, np.ndarray]:
    """All parameters and persistents by path."""
    serializer = DictionarySerializer()
    serializer.save(link)
    return serializer.target


def grads(link: Link) -> dict[str, object]:
    return {name: param.grad for name, param in sorted(link.namedparams())}


def inputs(rank: int = 0) -> np.ndarray:
    """Float32, shape (2, 3)."""
    return np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * rank


def backward(link: Link, rank: int):
    link.cleargrads()
    F.sum(link(inputs(rank)) ** 2).backward()


class Loss(Chain):
    """The sum of squares of a linear link's outputs, reported."""

    def __init__(self, value: float = 1.0):
        super().__init__(linear=linear(value))

    def forward(self, x: np.ndarray) -> Variable:
        loss = F.sum(self.linear(x) ** 2)
        report({"loss": loss}, self)
        return loss


def trainer(optimizer, examples, iterations=2, batch=2, length=None) -> Trainer:
    """Of these examples in their order, that writes into the current folder."""
    iterator = SerialIterator(examples, batch, shuffle=False)
    updater = StandardUpdater(iterator, optimizer)
    return Trainer(updater, length or (iterations, "iteration"), out="result")


def training(chainermn, comm, iterations=2, value=1.0, length=None, optimizer=None):
    """The trainer of a `Loss` on 4 examples of each rank, and the model."""
    model = Loss(value)
    rule = optimizer or SGD(0.001)
    rule = chainermn.create_multi_node_optimizer(rule, comm).setup(model)
    model.cleargrads()
    # Rank 0's parameters for all; with a loss, one of them would step as well.
    rule.update()
    examples = [row for n in range(2) for row in inputs(comm.rank + n)]
    return trainer(rule, examples, iterations, length=length), model
