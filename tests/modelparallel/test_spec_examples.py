"""The reference's examples of `MultiNodeChainList` and `pseudo_connect`, repaired and completed.

Class by class as they are printed there, with the imports, the constructor that the
page break cut and the peers that it leaves out; layers are smaller. Each rank also
computes the whole in one process, from the same weights.
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
from chainermn.functions import recv, send

# Others look on, in the full tier.
pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3), pytest.mark.ranks(2)]


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


class Peer(chainer.ChainList):
    """What a rank does that the reference leaves out, with a component of its own."""

    def __init__(self, call: Any) -> None:
        super().__init__(Sub())
        self.call = call

    def __call__(self, *inputs: Any) -> Any:
        return self.call(self[0], *inputs)


@pytest.fixture(autouse=True)
def same_weights_on_all_ranks():
    np.random.seed(0)
    with chainer.using_config("dtype", np.float64):
        yield


def loss_of(y: Any) -> Any:
    return F.sum(y * y)


def inputs(units: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(2, units))


def check(
    comm: Any,
    units: int,
    parts: list[chainer.Link],
    *models: tuple[Any, list[int]],
    start: int = 0,
) -> None:
    """Each rank's model has copies of some of the parts, which make the whole one after another.

    The rank `start` has the inputs.
    """
    x = y = inputs(units)
    for part in parts:
        part.cleargrads()  # which are NaN, equal to any other
        y = part(y)
    loss_of(y).backward()
    if comm.rank < len(models):
        model, numbers = models[comm.rank]
        given = [x] if comm.rank == start else []
        check_rank(model, [parts[number] for number in numbers], given, y)


def check_rank(
    model: Any, parts: list[chainer.Link], given: list[Any], y: Variable
) -> None:
    """With the weights of the parts, the model gives `y` or a delegate, and their gradients."""
    mine = [(model[i], part) for i, part in enumerate(parts)]
    for link, part in mine:
        link.copyparams(part)
        link.cleargrads()
    found = model(*given)
    if found.shape == y.shape:  # else it is a delegate
        np.testing.assert_allclose(found.array, y.array, rtol=1e-12)
        found = loss_of(found)
    found.backward()
    for link, part in mine:
        for (name, param), expected in zip(
            link.namedparams(), part.params(), strict=True
        ):
            assert np.all(np.isfinite(param.grad)), (
                f"{name} has the NaN that it began with"
            )
            np.testing.assert_allclose(
                param.grad, expected.grad, rtol=1e-12, atol=1e-12
            )


def test_basic_usage(comm):
    def peer() -> Variable:
        return recv(comm, rank=0)

    check(
        comm,
        6,
        [SimpleModelSub(6, 5, 4)],
        (SimpleModel(comm, 6, 5, 4), [0]),
        (peer, []),
    )


def test_split_mlp_on_two_processes(comm):
    parts = [MLP(100, 50, 20), MLP(20, 5, 10), MLP(10, 5, 10)]
    check(comm, 100, parts, (Model0(comm), [0, 2]), (Model1(comm), [1]))


def test_sending_tuples(comm):
    models = Model_on_Process_0(comm), Model_on_Process_1(comm)
    check(comm, 4, [NN0(), NN1()], (models[0], [0]), (models[1], [1]))


@pytest.mark.sizes(4)
def test_connected_graph(comm):
    """Rank 3 has the inputs, rank 1 the loss; rank 2 looks on."""
    check(
        comm,
        4,
        [Sub(), Sub(), Sub()],
        (ConnectedGraph(comm), [1]),
        (Peer(lambda sub: sub(recv(comm, rank=0))), [2]),
        (lambda: Variable(np.zeros(0)), []),
        (Peer(lambda sub, x: send(sub(x), comm, rank=0)), [0]),
        start=3,
    )


@pytest.mark.sizes(4)
def test_non_connected_graph(comm):
    """Rank 3 has the inputs, rank 1 lies between the components, rank 2 has the loss."""
    check(
        comm,
        4,
        [Sub() for _ in range(5)],
        (NonConnectedGraph(comm), [1, 3]),
        (Peer(lambda sub: send(sub(recv(comm, rank=0)), comm, rank=0)), [2]),
        (Peer(lambda sub: sub(recv(comm, rank=0))), [4]),
        (Peer(lambda sub, x: send(sub(x), comm, rank=0)), [0]),
        start=3,
    )


def test_non_connected_graph_2(comm):
    """Its output is that of the first component, from which backward goes on to the second."""
    x, (first, second, before) = inputs(4), [Sub(), Sub(), Sub()]
    for part in (first, second, before):
        part.cleargrads()
    y, z = first(before(x)), second(x)
    (loss_of(y) + loss_of(z)).backward()
    if comm.rank == 0:
        check_rank(NonConnectedGraph2(comm), [first, second], [x], y)
    elif comm.rank == 1:

        def both_ways(sub: Any, x: Any) -> Variable:
            return recv(comm, rank=0, delegate_variable=send(sub(x), comm, rank=0))

        check_rank(Peer(both_ways), [before], [x], z)
