"""Backward meets communications in the reverse of the order in which forward did."""

from __future__ import annotations

import chainer.functions as F
import numpy as np
import pytest
from chainer import Variable
from numpy.testing import assert_array_equal

from chainermn_modelparallel import (
    MultiNodeBatchNormalization,
    MultiNodeChainList,
    allreduce,
    create_mnbn_model,
    pseudo_connect,
    recv,
    send,
)

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3)]


def test_an_exchange_needs_no_delegate_between_send_and_recv(comm):
    """Each rank would wait for the other's gradient before it sends its own."""
    x = Variable(np.arange(3.0))
    if comm.rank < 2:
        if comm.rank == 0:
            delegate = send(x, comm, 1)
            y = recv(comm, 1)
        else:
            y = recv(comm, 0)
            delegate = send(x, comm, 0)
        pseudo_connect(delegate, F.sum(y * y)).backward()
        assert_array_equal(x.grad, 2 * x.array)


@pytest.mark.parametrize("deeper", [0, 1])
def test_sends_and_collectives_keep_their_order(comm, deeper):
    """Visited by depth alone, one rank would wait in `send`, the other in `allreduce`."""
    x = Variable(np.arange(3.0))
    z = Variable(np.arange(3.0))
    given = z
    if comm.rank == deeper:
        given = F.identity(F.identity(z))
    total = allreduce(comm, given)
    loss = F.sum(total)
    if comm.rank == 0:
        loss = pseudo_connect(send(F.identity(x), comm, 1), loss)
    elif comm.rank == 1:
        loss = loss + F.sum(recv(comm, 0) ** 2)
    loss.backward()
    assert_array_equal(z.grad, np.full(3, comm.size))
    if comm.rank == 0:
        assert_array_equal(x.grad, 2 * x.array)


class Wrapper:
    """As one that measures time: a class of its own, with a communicator in it."""

    def __init__(self, comm):
        self.comm = comm

    def __getattr__(self, name):
        return getattr(self.comm, name)


def test_a_wrapper_of_a_communicator_is_one(comm):
    wrapper = Wrapper(Wrapper(comm))
    x = Variable(np.arange(3.0))
    if comm.rank == 0:
        send(x, wrapper, 1).backward()
    elif comm.rank == 1:
        F.sum(recv(wrapper, 0) ** 2).backward()
    link = create_mnbn_model(MultiNodeBatchNormalization(3, wrapper), wrapper)
    y = link(F.stack([x, x]))
    F.sum(allreduce(wrapper, y)).backward()
    expected = np.zeros(3)  # of the normalization of equal vectors
    if comm.rank == 0:
        expected = 2 * x.array
    assert_array_equal(x.grad, expected)
    MultiNodeChainList(wrapper).add_link(link, rank_out=0)
