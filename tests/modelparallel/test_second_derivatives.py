"""Gradients of gradients through `send` and `recv`, against the same graph in one process.

Each rank's second backward starts from the gradients of its parameters and of `hold`, a
variable without data that all its communication leads back to.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import Variable

from chainermn_modelparallel import (
    MultiNodeBatchNormalization,
    allreduce,
    gather,
    pseudo_connect,
    recv,
    send,
)
from tests.support.oracles import graphs
from tests.support.oracles.graphs import Component, Part

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3)]


def run(
    comm: Any, graph: list[Part], links: list[Component], hold: Variable
) -> Variable:
    """This rank's part of a graph, by `send` and `recv` alone: its loss."""
    thread, loss, own = hold, Variable(np.zeros(())), deque()
    for part, link in zip(graph, links, strict=True):
        if part.rank != comm.rank:
            continue
        arguments: list[Any] = (
            [] if part.rank_in is not None else [graphs.model_input()]
        )
        for rank in graphs.listed(part.rank_in):
            if rank == comm.rank:
                arguments.append(own.popleft())
            else:
                received = recv(comm, rank, delegate_variable=thread, force_tuple=True)
                thread = received[0]
                arguments.append(received)
        returned = link(*arguments)
        if part.rank_out is None:
            loss = graphs.loss_of(returned)
        for rank in graphs.listed(part.rank_out):
            if rank == comm.rank:
                own.append(returned)
            else:
                first, *others = graphs.flat(returned)
                thread = send((pseudo_connect(thread, first), *others), comm, rank)
    return pseudo_connect(thread, loss)


def penalty(gradients: list[Any]) -> Any:
    return sum(
        (F.sum(F.sin(g)) for g in gradients if g is not None),
        start=Variable(np.zeros(())),
    )


def check(comm: Any, graph: list[Part]) -> None:
    alone = graphs.components(graph)
    weights = [link.w for link in alone]
    total = sum(map(graphs.loss_of, graphs.in_one_process(graph, alone).values()))
    for link in alone:
        link.cleargrads()
    penalty(chainer.grad([total], weights, enable_double_backprop=True)).backward()

    links, hold = graphs.components(graph), Variable(np.zeros(0, "f"))
    mine = [
        link for part, link in zip(graph, links, strict=True) if part.rank == comm.rank
    ]
    for link in mine:
        link.cleargrads()
    loss = run(comm, graph, links, hold)
    wanted = [hold, *(link.w for link in mine)]
    again, *gradients = chainer.grad([loss], wanted, enable_double_backprop=True)
    pseudo_connect(again, penalty(gradients)).backward()
    for link, reference in zip(links, alone, strict=True):
        if link in mine:
            gradients = [
                0 if each.w.grad is None else each.w.grad for each in (link, reference)
            ]
            np.testing.assert_allclose(*gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.sizes(2, 3, 4)
@graphs.any_of(8)
def test_of_any_graph(comm, examples):
    graphs.check_drawn(lambda graph: check(comm, graph), comm.size, examples)


def test_of_what_goes_there_and_back(comm):
    """The second backward comes to the gradient that the first one sent, too."""
    check(comm, [Part(0, None, 1), Part(1, 0, 0), Part(0, 1, None)])


def test_third_derivatives_cross_ranks(comm):
    def differentiate(y: Variable, x: Variable) -> list[Variable]:
        found = [y]
        for _ in range(3):
            found += chainer.grad([found[-1]], [x], enable_double_backprop=True)
        return found[1:]

    if comm.rank == 0:
        x = Variable(np.array([1.5]))
        found = [y.array.item() for y in differentiate(send(x, comm, 1), x)]
        np.testing.assert_allclose(
            found, [5 * 1.5**4, 20 * 1.5**3, 60 * 1.5**2], rtol=1e-12
        )
    elif comm.rank == 1:
        hold = Variable(np.zeros(0, "f"))
        differentiate(F.sum(recv(comm, 0, delegate_variable=hold) ** 5), hold)


def test_of_weights_needs_no_delegate(comm):
    """What goes back for the second time are gradients of the gradient of w, y^3."""
    data = np.array([0.5, 2.0])
    if comm.rank == 0:
        x = Variable(data)
        delegate = send(x, comm, 1)
        delegate.backward(enable_double_backprop=True)
        x.cleargrad()
        delegate.backward()
        np.testing.assert_allclose(x.grad, 6 * data**5, rtol=1e-12)
    elif comm.rank == 1:
        w = Variable(np.array([3.0, 5.0]))
        F.sum(w * recv(comm, 0) ** 3).backward(enable_double_backprop=True)
        gw = w.grad_var
        w.cleargrad()
        F.sum(gw**2).backward()


@pytest.mark.sizes(1, 2, 3, 4)
def test_third_derivatives_of_a_sum_over_ranks(comm):
    """Chainer makes the node of an output that nobody kept anew, without its data: only once."""
    x = Variable(np.array([1.5 + comm.rank]))
    n, total = comm.size, sum(1.5 + rank for rank in range(comm.size))
    y = F.sum(allreduce(comm, x) ** 4)
    for order, expected in enumerate(
        (4 * total**3, 12 * total**2, 24 * total), start=1
    ):
        (y,) = chainer.grad([y], [x], enable_double_backprop=True)
        np.testing.assert_allclose(y.array, [n**order * expected], rtol=1e-12)


@pytest.mark.sizes(1, 2, 3, 4)
def test_a_graph_that_is_differentiated_again_twice(comm, random):
    link = MultiNodeBatchNormalization(3, comm, dtype=np.float64)
    x = Variable(random.standard_normal((4, 3)))
    y = F.sum(link(x) ** 3)
    found = []
    for _ in range(2):
        (gx,) = chainer.grad([y], [x], enable_double_backprop=True)
        x.cleargrad()
        F.sum(gx**2).backward()
        found.append(x.grad)
    assert found[0].any()
    np.testing.assert_array_equal(found[0], found[1])


def test_of_one_of_two_starts_from_the_gradient_of_any_delegate(comm):
    """It leads to what was sent back and to what merely passed by, whatever its size."""
    if comm.rank == 0:
        x = Variable(np.array([1.0, 2.0]))
        send((np.ones(3), x), comm, 1).backward(enable_double_backprop=True)
        gradient, x.grad_var = x.grad_var, None
        F.sum(gradient**2).backward()
        np.testing.assert_allclose(x.grad, 36 * x.array**3)
    elif comm.rank == 1:
        hold = Variable(np.zeros(2))
        first, second = recv(comm, 0, delegate_variable=hold)
        (F.sum(first**3) + F.sum(second**3)).backward(enable_double_backprop=True)
        gradient, hold.grad_var = hold.grad_var, None
        gradient.backward()


def test_of_a_gather_off_the_root_that_a_recv_leads_back_to(comm, random):
    """The gradient that reaches its delegate leads to what `recv` sent back, and so must ours."""
    data = random.standard_normal(comm.size)
    alone = [Variable(np.array(value)) for value in data]
    total = F.exp(sum(x**2 for x in alone))
    loss = F.sin(total) * 2 if comm.size > 1 else total
    penalty(chainer.grad([loss], alone, enable_double_backprop=True)).backward()

    x = Variable(np.array(data[comm.rank]))
    found = gather(comm, x**2)
    if comm.rank == 0:
        hold = Variable(np.zeros(0, "f"))
        delegate = send(pseudo_connect(hold, F.exp(sum(found))), comm, 1)
        wanted, loss = [hold, x], delegate
    elif comm.rank == 1:
        wanted, loss = [x], F.sin(recv(comm, 0, delegate_variable=found)) * 2
    else:
        wanted, loss = [x], found
    gradients = chainer.grad([loss], wanted, enable_double_backprop=True)
    again = penalty(gradients[-1:])
    (pseudo_connect(gradients[0], again) if len(gradients) > 1 else again).backward()
    np.testing.assert_allclose(x.grad, alone[comm.rank].grad, rtol=1e-10)
