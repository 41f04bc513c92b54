"""What would end in a wait, or in half a model untrained, is told at once and by name."""

from __future__ import annotations

import gc
import warnings

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import Variable

from chainermn_comm import RankMismatchError
from chainermn_modelparallel import recv, send

pytestmark = [pytest.mark.world, pytest.mark.sizes(2)]


def drop_a_send(comm, tag):
    send(Variable(np.ones(2, "f")), comm, 1, tag=tag)
    gc.collect()


def drop_a_recv(comm, tag):
    y = recv(comm, 0, tag=tag)
    del y
    gc.collect()


def test_a_receiver_alone_in_no_backprop_mode_raises(comm):
    if comm.rank == 0:
        with pytest.warns(RuntimeWarning, match="dropped"):
            drop_a_send(comm, 4)
    else:
        text = r"rank 1: recv\(rank=0, tag=4\) runs in no_backprop_mode, but rank 0 called send"
        with chainer.no_backprop_mode(), pytest.raises(RankMismatchError, match=text):
            recv(comm, 0, tag=4)
    comm.allgather_obj(0)


def test_a_dropped_delegate_is_told_at_once_and_when_its_gradient_comes(comm):
    if comm.rank == 0:
        text = r"rank 0: the delegate variable that send\(rank=1, tag=7\) returned was dropped"
        with pytest.warns(RuntimeWarning, match=text):
            drop_a_send(comm, 7)
        x = Variable(np.ones(2, "f"))
        delegate = send(x, comm, 1)
        text = r"rank 0: rank 1 ran backward.*that send\(rank=1, tag=7\) returned was dropped"
        with pytest.raises(RuntimeError, match=text):
            delegate.backward()
        delegate.backward()
        np.testing.assert_array_equal(x.grad, [3, 3])
    else:
        a, b = recv(comm, 0, tag=7), recv(comm, 0)
        F.sum(a).backward()
        F.sum(b * 3).backward()


def test_what_was_received_and_dropped_is_told(comm):
    if comm.rank == 0:
        with pytest.warns(RuntimeWarning, match="send"):
            drop_a_send(comm, 3)
    else:
        with pytest.warns(RuntimeWarning, match=r"rank 1: what recv\(rank=0, tag=3\) returned"):
            drop_a_recv(comm, 3)
    comm.allgather_obj(0)


def test_nothing_is_told_of_what_was_visited_or_needs_no_gradient(comm):
    def step(train):
        if comm.rank == 0:
            x = Variable(np.ones(2, "f"))
            y = recv(comm, 1, delegate_variable=send(x, comm, 1))
            if train:
                F.sum(y).backward()
        else:
            delegate = send(recv(comm, 0) * 2, comm, 0)
            if train:
                delegate.backward()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step(train=True)
        with chainer.no_backprop_mode():
            step(train=False)
        if comm.rank == 0:  # gradients with a graph that nobody differentiates
            x = Variable(np.ones(2, "f"))
            chainer.grad([send(x, comm, 1)], [x], enable_double_backprop=True)
        else:
            hold = Variable(np.zeros(0, "f"))
            y = recv(comm, 0, delegate_variable=hold)
            chainer.grad([F.sum(y**2)], [hold], enable_double_backprop=True)
            del y
        gc.collect()
    assert [str(each.message) for each in told if each.category is RuntimeWarning] == []


@pytest.mark.parametrize("twice", [0, 1])
def test_a_second_derivative_on_one_rank_only_raises(comm, twice):
    """Else it would lack the other rank's part, or wait for it."""
    double = comm.rank == twice
    if comm.rank == 0:
        x = Variable(np.ones(3))
        delegate = send(x**2, comm, 1, tag=2)
        text = rf"backward of send\(rank=1, tag=2\): rank {twice} runs it with enable_double"
        with pytest.raises(RankMismatchError, match=text):
            chainer.grad([delegate], [x], enable_double_backprop=double)
    else:
        hold = Variable(np.zeros(0, "f"))
        y = recv(comm, 0, delegate_variable=hold, tag=2)
        chainer.grad([F.sum(y**2)], [hold], enable_double_backprop=double)
