"""The reference's examples of `MultiNodeChainList` and `pseudo_connect`, repaired and completed.

Class by class as they are printed there, with the imports, the constructor that the
page break cut and the peers that it leaves out; layers are smaller. Each rank also
computes the whole in one process, from the same weights.
"""

# ruff: noqa: UP008 - `super` is called as it was in the days of the reference

from __future__ import annotations

import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
import pytest
from chainer import Chain, ChainList, using_config
from numpy.random import default_rng
from numpy.testing import assert_allclose

pytestmark = [pytest.mark.world, pytest.mark.sizes(2)]


class MLP(Chain):
    def __init__(self, n_in, n_hidden, n_out):
        super(MLP, self).__init__(
            l1=L.Linear(n_in, n_hidden),
            l2=L.Linear(n_hidden, n_hidden),
            l3=L.Linear(n_hidden, n_out),
        )

    def __call__(self, x):
        h1 = F.relu(self.l1(x))
        h2 = F.relu(self.l2(h1))
        return self.l3(h2)


class Model0(chainermn.MultiNodeChainList):
    def __init__(self, comm):
        super(Model0, self).__init__(comm)
        self.add_link(MLP(100, 50, 20), rank_in=None, rank_out=1)
        self.add_link(MLP(10, 5, 10), rank_in=1, rank_out=None)


class Model1(chainermn.MultiNodeChainList):
    def __init__(self, comm):
        super(Model1, self).__init__(comm)
        self.add_link(MLP(20, 5, 10), rank_in=0, rank_out=0)


class NN0(Chain):
    def __init__(self):
        super().__init__(l=L.Linear(4, 4))

    def __call__(self, x):
        y0 = F.tanh(self.l(x))
        y1 = F.sin(self.l(x))
        return y0, y1


class NN1(Chain):
    def __init__(self):
        super().__init__(l=L.Linear(4, 4))

    def __call__(self, y):
        y0, y1 = y  # unpack tuple from NN0
        return self.l(y0) * y1


class Model_on_Process_0(chainermn.MultiNodeChainList):
    def __init__(self, comm):
        super(Model_on_Process_0, self).__init__(comm=comm)
        self.add_link(NN0(), rank_in=None, rank_out=1)


class Model_on_Process_1(chainermn.MultiNodeChainList):
    def __init__(self, comm):
        super(Model_on_Process_1, self).__init__(comm=comm)
        self.add_link(NN1(), rank_in=0, rank_out=None)


@pytest.fixture(autouse=True)
def same_weights_on_all_ranks():
    np.random.seed(0)
    with using_config("dtype", np.float64):
        yield


def loss_of(y):
    return F.sum(y * y)


def check(model, units, parts, mine):
    """Give this rank's model the weights of its parts; it gives what all parts give."""
    x = y = default_rng(7).normal(size=(2, units))
    for part in parts:
        part.cleargrads()  # which are NaN, equal to any other
        y = part(y)
    loss_of(y).backward()
    for link, part in zip(model, parts[mine], strict=True):
        link.copyparams(part)
        link.cleargrads()
    if mine.start == 0:
        found = model(x)
    else:
        found = model()
    if found.size:  # else it is a delegate
        assert_allclose(found.array, y.array, rtol=1e-12)
    loss_of(found).backward()
    for param, part in zip(
        model.params(), ChainList(*parts[mine]).params(), strict=True
    ):
        assert_allclose(param.grad, part.grad, rtol=1e-12, atol=1e-12)


def test_split_mlp_on_two_processes(comm):
    parts = [MLP(100, 50, 20), MLP(20, 5, 10), MLP(10, 5, 10)]
    if comm.rank == 0:
        check(Model0(comm), 100, parts, slice(0, 3, 2))
    else:
        check(Model1(comm), 100, parts, slice(1, 2))


def test_sending_tuples(comm):
    parts = [NN0(), NN1()]
    if comm.rank == 0:
        check(Model_on_Process_0(comm), 4, parts, slice(0, 1))
    else:
        check(Model_on_Process_1(comm), 4, parts, slice(1, 2))
