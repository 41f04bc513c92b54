"""Backward meets communications in the reverse of the order in which forward did."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Variable

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
        np.testing.assert_array_equal(x.grad, 2 * x.array)


@pytest.mark.parametrize("deeper", [0, 1])
def test_sends_and_collectives_keep_their_order(comm, deeper):
    """Visited by depth alone, one rank would wait in `send`, the other in `allreduce`."""
    x, z = Variable(np.arange(3.0)), Variable(np.arange(3.0))
    total = allreduce(comm, F.identity(F.identity(z)) if comm.rank == deeper else z)
    loss = F.sum(total)
    if comm.rank == 0:
        loss = pseudo_connect(send(F.identity(x), comm, 1), loss)
    elif comm.rank == 1:
        loss = loss + F.sum(recv(comm, 0) ** 2)
    loss.backward()
    np.testing.assert_array_equal(z.grad, np.full(3, comm.size))
    if comm.rank == 0:
        np.testing.assert_array_equal(x.grad, 2 * x.array)


class Wrapper:
    """As one that measures time: a class of its own, with a communicator in it."""

    def __init__(self, comm):
        self.comm, self.calls = comm, []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.comm, name)


class Double(chainer.Chain):
    def forward(self, x):
        return 2 * F.identity(x)


def test_a_wrapper_of_a_communicator_is_one(comm):
    wrapper = Wrapper(Wrapper(comm))
    here, last = comm.rank, comm.size - 1
    x = Variable(np.arange(3.0) + here)
    if here == 0:
        send(x, wrapper, 1).backward()
        np.testing.assert_array_equal(x.grad, 2 * x.array)
    elif here == 1:
        F.sum(recv(wrapper, 0) ** 2).backward()
    total = allreduce(wrapper, x)
    np.testing.assert_array_equal(
        total.array, sum(np.arange(3.0) + r for r in range(comm.size))
    )
    F.sum(total).backward()

    everything = np.arange(6 * comm.size, dtype=np.float32).reshape(-1, 2) ** 2
    alone, part = L.BatchNormalization(2), slice(3 * here, 3 * here + 3)
    expected = alone(everything).array[part]
    for norm in (
        MultiNodeBatchNormalization(2, wrapper),
        create_mnbn_model(alone, wrapper),
    ):
        np.testing.assert_allclose(norm(everything[part]).array, expected, atol=1e-5)

    model = MultiNodeChainList(wrapper)
    model.add_link(
        Double(), here - 1 if here else None, here + 1 if here < last else None
    )
    result = model(*[np.ones(2, np.float32)] * (here == 0))
    if here == last:
        np.testing.assert_array_equal(result.array, np.full(2, 2.0**comm.size))
    assert {"rank", "handshake"} <= {*wrapper.calls}
