"""A rank with fewer batches takes part without examples."""

from __future__ import annotations

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer.optimizer_hooks import GradientClipping

from chainermn_comm import RankMismatchError
from chainermn_train import join
from tests.support.training.exchanges import KINDS, exchanging
from tests.support.training.trainers import assert_near, same_everywhere

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("double_precision")]


class Model(chainer.Chain):
    def __init__(self, seed):
        super().__init__()
        np.random.seed(seed)
        with self.init_scope():
            self.first, self.unused, self.last = (
                L.Linear(3, 4),
                L.Linear(3, 1),
                L.Linear(4, 1),
            )

    def __call__(self, x):
        y = self.last(chainer.functions.tanh(self.first(x)))
        return chainer.functions.mean(y * y)


def batch(rank, number):
    return np.random.RandomState((rank, number)).uniform(-1, 1, (2, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("most", [0, 5])
def test_means_are_of_the_ranks_that_have_examples(comm, kind, steps, most):
    """Twice, since a rank that has joined goes on with the others."""
    mine, expected = Model(comm.rank), Model(0)
    many = exchanging(kind, comm, chainer.optimizers.SGD(0.3), mine, steps)
    many.add_hook(GradientClipping(0.5))
    single = chainer.optimizers.SGD(0.3).setup(expected)
    single.add_hook(GradientClipping(0.5))
    for epoch in range(2):
        counts = [most + 2 * ((rank + epoch) % comm.size) for rank in range(comm.size)]
        with join(many):
            for number in range(counts[comm.rank]):
                many.update(mine, batch(comm.rank, number))
        for first in range(0, max(counts), steps):
            batches = [
                batch(rank, number)
                for number in range(first, first + steps)
                for rank, count in enumerate(counts)
                if number < count
            ]
            expected.cleargrads()
            loss = sum(expected(x) for x in batches) / len(batches) if batches else None
            if loss is not None:
                loss.backward()
                single.update()
        many.flush()
        assert same_everywhere(comm, mine)
        assert many.t == single.t
        if kind != "double buffering":  # whose gradients are of the parameters before
            assert_near(mine, expected, 1e-10)
    many.finalize()


@pytest.mark.sizes(2, 3, 4)
def test_something_else_while_others_have_joined_is_told(comm):
    optimizer = exchanging("synchronous", comm, chainer.optimizers.SGD(), Model(0))
    optimizer.update(optimizer.target, batch(comm.rank, 0))
    with pytest.raises(RankMismatchError, match="update"), join(optimizer):
        optimizer.flush() if comm.rank == 0 else None
    optimizer.update(optimizer.target, batch(comm.rank, 0))
    assert same_everywhere(comm, optimizer.target)


def test_an_error_within_and_another_optimizer_are_raised_at_once(comm):
    optimizer = exchanging("synchronous", comm, chainer.optimizers.SGD(), Model(0))
    with pytest.raises(ZeroDivisionError), join(optimizer):
        raise ZeroDivisionError
    with pytest.raises(TypeError, match="not SGD"), join(optimizer.actual_optimizer):
        pass
