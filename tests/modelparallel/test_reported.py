"""What would end in a wait, or in half a model untrained, is told at once and by name."""

from __future__ import annotations

import gc
import warnings

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import Sequential, Variable, no_backprop_mode
from numpy.testing import assert_array_equal

from chainermn_comm import RankMismatchError
from chainermn_modelparallel import (
    MultiNodeChainList,
    allgather,
    pseudo_connect,
    recv,
    send,
)
from tests.support.worlds.third_party import WITH_THIRD_PARTY

pytestmark = [pytest.mark.world, pytest.mark.sizes(2), WITH_THIRD_PARTY]


def ones():
    return Variable(np.ones(2, "f"))


def drop_a_send(comm, tag):
    send(ones(), comm, 1, tag=tag)
    gc.collect()


def drop_a_recv(comm, tag):
    recv(comm, 0, tag=tag)
    gc.collect()


@pytest.mark.parametrize("backward", [False, True])
def test_a_receiver_alone_in_no_backprop_mode_gets_the_value(comm, backward):
    """As in a script that uses the mode for evaluation on that rank alone; backward is told."""
    if comm.rank == 0:
        delegate = send(ones(), comm, 1, tag=4)
        text = r"rank 0: backward of send\(rank=1, tag=4\).*: rank 1 called recv in no_backprop"
        if backward:
            with pytest.raises(RankMismatchError, match=text):
                delegate.backward()
        else:
            with pytest.warns(RuntimeWarning, match="dropped before backward"):
                del delegate
    else:
        with no_backprop_mode():
            y = recv(comm, 0, tag=4)
        assert_array_equal(y.array, [1, 1])
        assert not y.requires_grad
    there_and_back(comm)


def there_and_back(comm):
    """Nothing that was refused is in the way of what comes later."""
    if comm.rank == 0:
        x = ones()
        send(x, comm, 1, tag=4).backward()
        assert_array_equal(x.grad, [3, 3])
    else:
        F.sum(recv(comm, 0, tag=4) * 3).backward()


def test_a_dropped_delegate_is_told_at_once_and_when_its_gradient_comes(comm):
    """The send whose backward raised can still get its own gradients."""
    if comm.rank == 0:
        text = r"rank 0: the delegate variable that send\(rank=1, tag=7\) returned was dropped"
        with pytest.warns(RuntimeWarning, match=text):
            drop_a_send(comm, 7)
        x = ones()
        delegate = send(x, comm, 1)
        text = "rank 0: rank 1 ran backward through a variable whose send on rank 0 is gone"
        with pytest.raises(RuntimeError, match=text):
            delegate.backward()
        delegate.backward()
        assert_array_equal(x.grad, [3, 3])
    else:
        a = recv(comm, 0, tag=7)
        b = recv(comm, 0)
        F.sum(a).backward()
        F.sum(b * 3).backward()
    there_and_back(comm)


def train_on_data(comm, tag):
    """What was received is used as data, so that its sender would wait for ever."""
    w = ones()
    F.sum(w * recv(comm, 0, tag=tag).array).backward()


def gather_all(comm):
    assert len(allgather(comm, np.ones(1))) == 2


@pytest.mark.parametrize(
    ("drop", "next_call"),
    [
        (drop_a_recv, there_and_back),
        (drop_a_recv, gather_all),
        (train_on_data, there_and_back),
    ],
)
def test_what_was_received_and_dropped_is_told_to_both(comm, drop, next_call):
    """The sender waits for its gradients; the receiver's next call tells it that none come."""
    if comm.rank == 0:
        delegate = send(ones(), comm, 1, tag=3)
        text = r"rank 0: backward of send\(rank=1, tag=3\) gets no gradients: rank 1 dropped"
        with pytest.raises(RankMismatchError, match=text):
            delegate.backward()
    else:
        text = r"rank 1: what recv\(rank=0, tag=3\) returned was dropped before"
        with pytest.warns(RuntimeWarning, match=text):
            drop(comm, 3)
    next_call(comm)


def test_what_both_dropped_is_in_nobodys_way(comm):
    """As a model that is evaluated without no_backprop_mode."""
    drop = drop_a_send
    if comm.rank:
        drop = drop_a_recv
    for tag in range(3):
        with pytest.warns(RuntimeWarning, match="dropped"):
            drop(comm, tag)
    there_and_back(comm)


def model_without_delegate(comm):
    model = MultiNodeChainList(comm)
    model.add_link(Sequential(lambda y: y * 3), 0, None)
    return model()


@pytest.mark.parametrize(
    "received",
    [
        lambda comm: recv(comm, 0) * 3,
        lambda comm: recv(comm, 0, Variable(np.zeros(0), requires_grad=False)) * 3,
        model_without_delegate,
    ],
)
def test_a_rank_that_has_no_delegate_to_go_on_from_says_so(comm, received):
    """It needn't depend on anything there: a second backward would wait for its part in vain."""
    if comm.rank == 0:
        x = ones()
        (gx,) = chainer.grad([send(x, comm, 1)], [x], enable_double_backprop=True)
        text = "rank 0: gradients that came from rank 1 can't be differentiated again: rank 1"
        with pytest.raises(RankMismatchError, match=text):
            F.sum(gx**2).backward()
    else:
        F.sum(received(comm)).backward(enable_double_backprop=True)
    there_and_back(comm)


def test_nor_has_a_model_one_for_its_second_message(comm):
    if comm.rank == 0:
        x = ones()
        y = ones()
        delegate = send(pseudo_connect(send(x, comm, 1), y), comm, 1)
        _, gy = chainer.grad([delegate], [x, y], enable_double_backprop=True)
        with pytest.raises(RankMismatchError, match="can't be differentiated again"):
            F.sum(gy**2).backward()
    else:
        model = MultiNodeChainList(comm)
        model.add_link(chainer.Sequential(lambda x, y: x * y), [0, 0], None)
        F.sum(model()).backward(enable_double_backprop=True)
    there_and_back(comm)


def test_nothing_is_told_of_what_was_visited_or_needs_no_gradient(comm):
    def step(train):
        if comm.rank == 0:
            x = ones()
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
        with no_backprop_mode():
            step(train=False)
        gc.collect()
    found = [str(each.message) for each in told if each.category is RuntimeWarning]
    assert found == []


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
