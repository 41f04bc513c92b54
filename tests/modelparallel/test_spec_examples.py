"""The reference's examples of `MultiNodeChainList` and `pseudo_connect`, repaired and completed.

Class by class as they are printed there, with the imports, the constructor that the page break
cut and the peers that it leaves out; layers are smaller. Each rank also computes the whole in one
process, from the same weights.
"""

# ruff: noqa: UP008 - `super` is called as it was in the days of the reference

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
import pytest
from chainer import Variable
from chainermn.functions import pseudo_connect, recv, send

pytestmark = [pytest.mark.world, pytest.mark.ranks(2, 4)]  # others look on, in the full tier


class SimpleModelSub(chainer.Chain):
    def __init__(self, n_in: int, n_hidden: int, n_out: int) -> None:
        super(SimpleModelSub, self).__init__(
            l1=L.Linear(n_in, n_hidden), l2=L.Linear(n_hidden, n_out)
        )

    def __call__(self, x: Any) -> Any:
        h1 = F.relu(self.l1(x))
        return self.l2(h1)


class SimpleModel(chainermn.MultiNodeChainList):
    def __init__(self, comm: Any, n_in: int, n_hidden: int, n_out: int) -> None:
        super(SimpleModel, self).__init__(comm)
        self.add_link(SimpleModelSub(n_in, n_hidden, n_out), rank_in=None, rank_out=1)


class MLP(chainer.Chain):
    def __init__(self, n_in: int, n_hidden: int, n_out: int) -> None:
        super(MLP, self).__init__(
            l1=L.Linear(n_in, n_hidden),
            l2=L.Linear(n_hidden, n_hidden),
            l3=L.Linear(n_hidden, n_out),
        )

    def __call__(self, x: Any) -> Any:
        h1 = F.relu(self.l1(x))
        h2 = F.relu(self.l2(h1))
        return self.l3(h2)


class Model0(chainermn.MultiNodeChainList):
    def __init__(self, comm: Any) -> None:
        super(Model0, self).__init__(comm)
        self.add_link(MLP(100, 50, 20), rank_in=None, rank_out=1)
        self.add_link(MLP(10, 5, 10), rank_in=1, rank_out=None)


class Model1(chainermn.MultiNodeChainList):
    def __init__(self, comm: Any) -> None:
        super(Model1, self).__init__(comm)
        self.add_link(MLP(20, 5, 10), rank_in=0, rank_out=0)


class NN0(chainer.Chain):
    def __init__(self) -> None:
        super().__init__(l=L.Linear(4, 4))

    def __call__(self, x: Any) -> Any:
        y0 = F.tanh(self.l(x))
        y1 = F.sin(self.l(x))
        return y0, y1


class NN1(chainer.Chain):
    def __init__(self) -> None:
        super().__init__(l=L.Linear(4, 4))

    def __call__(self, y: Any) -> Any:
        y0, y1 = y  # unpack tuple from NN0
        return self.l(y0) * y1


class Model_on_Process_0(chainermn.MultiNodeChainList):
    def __init__(self, comm: Any) -> None:
        super(Model_on_Process_0, self).__init__(comm=comm)
        self.add_link(NN0(), rank_in=None, rank_out=1)


class Model_on_Process_1(chainermn.MultiNodeChainList):
    def __init__(self, comm: Any) -> None:
        super(Model_on_Process_1, self).__init__(comm=comm)
        self.add_link(NN1(), rank_in=0, rank_out=None)


class Sub(chainer.Chain):
    """Every graph component that the notes on `pseudo_connect` only name."""

    def __init__(self) -> None:
        super().__init__(l=L.Linear(4, 4))

    def __call__(self, x: Any) -> Any:
        return F.tanh(self.l(x))


class ConnectedGraph(chainermn.MultiNodeChainList):
    def __init__(self, comm: Any) -> None:
        super(ConnectedGraph, self).__init__(comm)
        self.add_link(Sub(), rank_in=3, rank_out=1)


class NonConnectedGraph(chainermn.MultiNodeChainList):
    def __init__(self, comm: Any) -> None:
        super(NonConnectedGraph, self).__init__(comm)
        self.add_link(Sub(), rank_in=3, rank_out=1)
        self.add_link(Sub(), rank_in=1, rank_out=2)


class NonConnectedGraph2(chainermn.MultiNodeChainList):
    def __init__(self, comm: Any) -> None:
        super(NonConnectedGraph2, self).__init__(comm)
        self.add_link(Sub(), rank_in=1, rank_out=None)
        self.add_link(Sub(), rank_in=None, rank_out=1)


@pytest.fixture(autouse=True)
def float64():
    with chainer.using_config("dtype", np.float64):
        yield


def drawn(seed: int, make: Any, *arguments: Any) -> Any:
    """The link that `make` makes, whose weights the seed decides."""
    np.random.seed(seed)
    made = make(*arguments)
    made.cleargrads()  # which are NaN, equal to any other
    return made


def array(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=shape)


def loss_of(y: Any) -> Any:
    return F.sum(y * y)


def check_gradients(mine: chainer.Link, alone: chainer.Link) -> None:
    pairs = list(zip(mine.namedparams(), alone.namedparams(), strict=True))
    assert pairs
    for (name, param), (_, expected) in pairs:
        assert np.all(np.isfinite(param.grad)), f"{name} has the NaN that it began with"
        np.testing.assert_allclose(param.grad, expected.grad, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.sizes(2, 3)
def test_basic_usage(comm):
    model = drawn(0, SimpleModel, comm, 6, 5, 4)
    alone = drawn(0, SimpleModelSub, 6, 5, 4)
    y = alone(array(2, 6))
    loss_of(y).backward()
    if comm.rank == 0:
        model(array(2, 6)).backward()
        check_gradients(model[0], alone)
    elif comm.rank == 1:  # the peer
        found = recv(comm, rank=0)
        np.testing.assert_allclose(found.array, y.array, rtol=1e-12)
        loss_of(found).backward()


@pytest.mark.sizes(2, 3)
def test_split_mlp_on_two_processes(comm):
    first, last = drawn(0, MLP, 100, 50, 20), MLP(10, 5, 10)
    last.cleargrads()
    middle = drawn(1, MLP, 20, 5, 10)
    y = last(middle(first(array(2, 100))))
    loss_of(y).backward()
    if comm.rank == 0:
        model0 = drawn(0, Model0, comm)
        found = model0(array(2, 100))
        np.testing.assert_allclose(found.array, y.array, rtol=1e-12)
        loss_of(found).backward()
        check_gradients(model0[0], first)
        check_gradients(model0[1], last)
    elif comm.rank == 1:
        model1 = drawn(1, Model1, comm)
        model1().backward()
        check_gradients(model1[0], middle)


@pytest.mark.sizes(2, 3)
def test_sending_tuples(comm):
    parts = drawn(0, NN0), drawn(1, NN1)
    y = parts[1](parts[0](array(2, 4)))
    loss_of(y).backward()
    if comm.rank == 0:
        model = drawn(0, Model_on_Process_0, comm)
        model(array(2, 4)).backward()
        check_gradients(model[0], parts[0])
    elif comm.rank == 1:
        model = drawn(1, Model_on_Process_1, comm)
        found = model()
        np.testing.assert_allclose(found.array, y.array, rtol=1e-12)
        loss_of(found).backward()
        check_gradients(model[0], parts[1])


@pytest.mark.sizes(4)
def test_connected_graph(comm):
    alone = drawn(0, Sub)
    x = Variable(array(2, 4))
    loss_of(alone(x)).backward()
    if comm.rank == 0:
        model = drawn(0, ConnectedGraph, comm)
        model().backward()
        check_gradients(model[0], alone)
    elif comm.rank == 1:
        loss_of(recv(comm, rank=0)).backward()
    elif comm.rank == 3:
        check_sender(comm, x)


@pytest.mark.sizes(4)
def test_non_connected_graph(comm):
    """Rank 3 gives the inputs, rank 1 lies between the components, rank 2 has the loss."""
    first, second = drawn(0, Sub), Sub()
    second.cleargrads()
    between = drawn(1, Sub)
    x = Variable(array(2, 4))
    y = second(between(first(x)))
    loss_of(y).backward()
    if comm.rank == 0:
        model = drawn(0, NonConnectedGraph, comm)
        model().backward()
        check_gradients(model[0], first)
        check_gradients(model[1], second)
    elif comm.rank == 1:
        mine = drawn(1, Sub)
        send(mine(recv(comm, rank=0)), comm, rank=0).backward()
        check_gradients(mine, between)
    elif comm.rank == 2:
        found = recv(comm, rank=0)
        np.testing.assert_allclose(found.array, y.array, rtol=1e-12)
        loss_of(found).backward()
    else:
        check_sender(comm, x)


def check_sender(comm: Any, x: Variable) -> None:
    """The peer that gives rank 0 its input gets the gradient that `x` has in one process."""
    given = Variable(x.array.copy())
    send(given, comm, rank=0).backward()
    np.testing.assert_allclose(given.grad, x.grad, rtol=1e-12)


@pytest.mark.sizes(2, 3)
def test_non_connected_graph_2(comm):
    """Its output is that of the first component, from which backward goes on to the second."""
    first, second = drawn(0, Sub), Sub()
    second.cleargrads()
    x, own = Variable(array(2, 4)), array(3, 4)
    y, z = first(x), second(own)
    (loss_of(y) + loss_of(z)).backward()
    if comm.rank == 0:
        model = drawn(0, NonConnectedGraph2, comm)
        found = model(own)
        np.testing.assert_allclose(found.array, y.array, rtol=1e-12)
        loss_of(found).backward()
        check_gradients(model[0], first)
        check_gradients(model[1], second)
    elif comm.rank == 1:
        given = Variable(x.array.copy())
        delegate = send(given, comm, rank=0)
        found = recv(comm, rank=0, delegate_variable=delegate)
        np.testing.assert_allclose(found.array, z.array, rtol=1e-12)
        loss_of(found).backward()
        np.testing.assert_allclose(given.grad, x.grad, rtol=1e-12)


@pytest.mark.sizes(2, 3)
def test_sends_one_after_the_other_are_connected(comm):
    """The pathological case for which the reference advises `pseudo_connect` but has no code."""
    a, b = Variable(array(2, 4)), Variable(array(3))
    if comm.rank == 0:
        delegate = send(a, comm, rank=1)
        send(pseudo_connect(delegate, b), comm, rank=1).backward()
        np.testing.assert_allclose(a.grad, 2 * a.array, rtol=1e-12)
        np.testing.assert_allclose(b.grad, 2 * b.array, rtol=1e-12)
    elif comm.rank == 1:
        (loss_of(recv(comm, rank=0)) + loss_of(recv(comm, rank=0))).backward()
