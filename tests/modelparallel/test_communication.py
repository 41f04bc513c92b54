"""Backward meets communications in the reverse of the order in which forward did."""

from __future__ import annotations

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import Variable
from chainer.function_hooks import TimerHook

from chainermn_modelparallel import allreduce, pseudo_connect, recv, send

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
    assert names.count("CollectiveFunction") == 3  # forward, backward, and what that calls
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
    x, unused = Variable(np.ones((3, 2), "f")), Variable(np.ones(1), requires_grad=False)
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
