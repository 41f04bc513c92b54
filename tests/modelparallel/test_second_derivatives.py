"""Gradients of gradients through `send` and `recv`, against the same graph in one process.

Each rank's second backward starts from the gradients of its parameters and of `hold`, a
variable without data that all its communication leads back to.
"""

from __future__ import annotations

from collections import deque

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import Variable
from numpy.testing import assert_allclose

from chainermn_modelparallel import (
    allreduce,
    pseudo_connect,
    recv,
    send,
)
from tests.support.oracles import graphs

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3)]


def run(comm, graph, links, hold):
    """This rank's part of a graph, by `send` and `recv` alone: its loss."""
    thread = hold
    loss = Variable(np.zeros(()))
    own = deque()
    for part, link in zip(graph, links, strict=True):
        if part.rank != comm.rank:
            continue
        if part.rank_in is not None:
            arguments = []
        else:
            arguments = [graphs.model_input()]
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


def penalty(gradients):
    return sum(
        (F.sum(F.sin(g)) for g in gradients if g is not None),
        start=Variable(np.zeros(())),
    )


def check(comm, graph):
    alone = graphs.components(graph)
    weights = [link.w for link in alone]
    total = sum(map(graphs.loss_of, graphs.in_one_process(graph, alone).values()))
    for link in alone:
        link.cleargrads()
    penalty(chainer.grad([total], weights, enable_double_backprop=True)).backward()

    links = graphs.components(graph)
    hold = Variable(np.zeros(0, "f"))
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
            assert_allclose(*gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.sizes(2, 3, 4)
@graphs.any_of(8)
def test_of_any_graph(comm, examples):
    graphs.check_drawn(lambda graph: check(comm, graph), comm.size, examples)


@pytest.mark.sizes(1, 2, 3, 4)
def test_third_derivatives_of_a_sum_over_ranks(comm):
    """Chainer makes the node of an output that nobody kept anew, without its data: only once."""
    x = Variable(np.array([1.5 + comm.rank]))
    n = comm.size
    total = sum(1.5 + rank for rank in range(comm.size))
    y = F.sum(allreduce(comm, x) ** 4)
    for order, expected in enumerate(
        (4 * total**3, 12 * total**2, 24 * total), start=1
    ):
        (y,) = chainer.grad([y], [x], enable_double_backprop=True)
        assert_allclose(y.array, [n**order * expected], rtol=1e-12)
