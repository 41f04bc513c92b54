"""Backward meets communications in the reverse of the order in which forward did."""

from __future__ import annotations

from unittest import mock

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Variable
from chainer.function_hooks import TimerHook

from chainermn_comm import CommunicatorBase
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


def test_hooks_see_forward_and_backward(comm):
    x = Variable(np.ones(3))
    with TimerHook() as seen:
        F.sum(allreduce(comm, x)).backward()
    names = [name for name, _ in seen.call_history]
    assert names[:2] == ["CollectiveFunction", "Sum"]
    # Forward, backward, and what that calls.
    assert names.count("CollectiveFunction") == 3
    y, seen = allreduce(comm, x), TimerHook()  # a hook of one function
    y.creator.add_hook(seen)
    F.sum(y).backward()
    assert len(seen.call_history) == 1


def test_debug_mode_finds_nans(comm):
    with chainer.using_config("debug", True), pytest.raises(RuntimeError, match="NaN"):
        allreduce(comm, Variable(np.full(3, np.nan)))


@pytest.mark.parametrize("looked_at", [False, True])
def test_the_graph_is_the_same_whether_or_not_somebody_looks_on(comm, looked_at):
    """Where nobody does, it is built without Chainer's checks."""
    x, unused = (
        Variable(np.ones((3, 2), "f")),
        Variable(np.ones(1), requires_grad=False),
    )
    with TimerHook() if looked_at else chainer.using_config("debug", False):
        y = allreduce(comm, F.identity(x))
        z = allreduce(comm, unused)
    function = y.creator_node
    assert function.inputs[0].creator_node.inputs == (x.node,)
    assert function.outputs[0]() is y.node
    assert y.rank > function.inputs[0].rank
    assert [y.requires_grad, z.requires_grad] == [True, False]
    assert [y.layout, y.dtype, y.shape] == [None, np.float32, (3, 2)]
    with chainer.no_backprop_mode():
        assert allreduce(comm, x).creator_node is None


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


def test_a_double_of_one_rank_needs_nobody():
    """Whatever a mock answers: what one rank does alone is done. Other ranks can't be told."""
    one = mock.MagicMock(spec=CommunicatorBase, rank=0, size=1)
    x = Variable(np.arange(6, dtype=np.float32).reshape(3, 2))
    total = allreduce(one, x)
    F.sum(total * 2).backward()
    np.testing.assert_array_equal(total.array, x.array)
    np.testing.assert_array_equal(x.grad, np.full((3, 2), 2))
    alone, batch = L.BatchNormalization(2), x.array
    expected = alone(batch).array
    for norm in MultiNodeBatchNormalization(2, one), create_mnbn_model(alone, one):
        assert norm.comm is one
        np.testing.assert_allclose(norm(batch).array, expected, atol=1e-6)
    model = MultiNodeChainList(one)
    model.add_link(Double())
    np.testing.assert_array_equal(model(batch).array, 2 * batch)
    with pytest.raises(ValueError, match="there is no rank 1; ranks go from 0 to 0"):
        send(x, one, 1)
    several = mock.MagicMock(spec=CommunicatorBase, rank=0, size=2)
    for call in (lambda: allreduce(several, x), lambda: send(x, several, 1)):
        with pytest.raises(TypeError, match="must be a communicator, got MagicMock"):
            call()
