"""`send`, `recv` and `pseudo_connect` between ranks, against the same graph in one process.

Every rank computes the single-process equivalent for itself, from the same random
numbers, and compares its own part of the values and gradients with it.
"""

from __future__ import annotations

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import Variable
from chainer.memory_layouts import CUDNN_CHANNEL_LAST_X

from chainermn_modelparallel import pseudo_connect, recv, send
from tests.support.plugins.pairwise import pairwise
from tests.support.worlds.third_party import WITH_THIRD_PARTY

# Others look on, in the full tier.
pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3), pytest.mark.ranks(2)]

FLOATS = (np.float16, np.float32, np.float64)
LAYOUTS = {
    "matrix": lambda r: r.standard_normal((3, 4)),
    "fortran": lambda r: np.asfortranarray(r.standard_normal((3, 4))),
    "strided": lambda r: r.standard_normal((6, 8))[::2, 1::2],
    "transposed": lambda r: r.standard_normal((2, 3, 4)).transpose(2, 0, 1),
    "read-only": lambda r: np.broadcast_to(r.standard_normal((4,)), (3, 4)),
    "0-d": lambda r: np.array(r.standard_normal()),
    "empty": lambda r: np.zeros((0, 3)),
    # MPI waits for the receiver with these.
    "large": lambda r: r.standard_normal((300, 400)),
}


def equal(actual, desired):
    """Same dtype and bits: what travels must not change."""
    assert actual.dtype == desired.dtype
    np.testing.assert_array_equal(actual, desired)


@pytest.mark.parametrize(
    *pairwise(comm=["naive", "third party"], layout=LAYOUTS, dtype=FLOATS).args,
    indirect=["comm"],
)
def test_any_float_array_goes_there_and_its_gradient_back(comm, random, dtype, layout):
    data = LAYOUTS[layout](random).astype(dtype, copy=False)
    weights = random.standard_normal(data.shape).astype(dtype)
    alone = Variable(data)
    F.sum(alone * alone * weights).backward()
    if comm.rank == 0:
        x = Variable(data)
        delegate = send(x, comm, 1)
        assert delegate.shape == (0,)
        delegate.backward()
        equal(x.grad, alone.grad)
    elif comm.rank == 1:
        x = recv(comm, 0)
        equal(x.array, data)
        F.sum(x * x * weights).backward()


@pytest.mark.sizes(2)
@pytest.mark.parametrize("force_tuple", [False, True])
@pytest.mark.parametrize("kind", [tuple, list])
def test_one_variable_is_a_tuple_only_if_forced(comm, kind, force_tuple):
    if comm.rank == 0:
        x = Variable(np.ones(2, "f"))
        send(kind([x]), comm, 1).backward()
        equal(x.grad, np.full(2, 3, "f"))
    else:
        y = recv(comm, 0, force_tuple=force_tuple)
        assert isinstance(y, tuple) == force_tuple
        F.sum((y[0] if force_tuple else y) * 3).backward()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("tags", [(0, 0), (3, 9)])
@WITH_THIRD_PARTY
def test_gradients_find_their_send_in_whatever_order_they_come(
    comm, random, first, tags
):
    """Both sends are alike, so a gradient given to the wrong one would not be noticed."""
    # Large enough for MPI to wait for the receiver: a wait in the wrong order would
    # hang.
    data = random.standard_normal((2, 300, 300)).astype("f")
    if comm.rank == 0:
        xs = [Variable(array) for array in data]
        delegates = [send(x, comm, 1, tag=tag) for x, tag in zip(xs, tags, strict=True)]
        delegates[first].backward()
        delegates[1 - first].backward()
        equal(xs[0].grad, data[0] * 2)
        equal(xs[1].grad, data[1] * 6)
    elif comm.rank == 1:
        ys = [recv(comm, 0, tag=tag) for tag in tags]
        for loss in (F.sum(ys[0] ** 2), F.sum(3 * ys[1] ** 2)):
            loss.backward()


@WITH_THIRD_PARTY
def test_integers_arrive_and_have_no_gradient(comm):
    """Nobody waits for one either: both ranks know at once, from the message."""
    labels = np.array([1, 0, 2], np.int32)
    if comm.rank == 0:
        x = Variable(np.ones((3, 3), "f"))
        send((x, Variable(labels)), comm, 1).backward()
        assert x.grad.any()
        send(Variable(labels), comm, 1).backward()
    elif comm.rank == 1:
        x, t = recv(comm, 0)
        equal(t.array, labels)
        assert not t.requires_grad
        F.softmax_cross_entropy(x, t).backward()
        assert not recv(comm, 0).requires_grad


def test_what_needs_no_gradient_at_the_sender_sends_none_back(comm):
    if comm.rank == 0:
        fixed = Variable(np.ones(3, "f"), requires_grad=False)
        assert not send(fixed, comm, 1).requires_grad
        x = Variable(np.ones(3, "f"))
        send((fixed, x), comm, 1).backward()
        assert fixed.grad is None
        equal(x.grad, np.full(3, 5, "f"))
    elif comm.rank == 1:
        w = Variable(np.ones(3, "f"))
        y = recv(comm, 0)
        assert not y.requires_grad
        F.sum(y * w).backward()  # would wait for ever if the gradient were sent
        equal(w.grad, np.ones(3, "f"))
        fixed, x = recv(comm, 0)
        F.sum(fixed * 7 + x * 5).backward()
    nothing_is_left(comm)


def nothing_is_left(comm):
    """No message that nobody received lies between ranks 0 and 1, in either direction."""
    if comm.rank < 2:
        comm.send_with_metadata(b"last", (), 1 - comm.rank, comm.reserved_tag)
        assert comm.recv_with_metadata(1 - comm.rank, comm.reserved_tag)[0] == b"last"


def test_the_delegate_is_reached_through_what_has_no_gradient(comm):
    """Labels that come after a send keep the path to it, once they are connected."""
    if comm.rank == 0:
        x = Variable(np.ones(2, "f"))
        labels = recv(comm, 1, delegate_variable=send(x, comm, 1))
        pseudo_connect(labels, Variable(np.array(1.0, "f"))).backward()
        equal(x.grad, np.full(2, 4, "f"))
    elif comm.rank == 1:
        x = recv(comm, 0)
        send(np.arange(3), comm, 0)
        F.sum(x * 4).backward()


def test_the_second_derivative_ends_where_the_function_is_linear(comm, random):
    """The gradient w of w x doesn't depend on x, but on w; no rank waits in vain."""
    data, weights = random.standard_normal((2, 4))
    if comm.rank == 0:
        x = Variable(data)
        (gx,) = chainer.grad([send(x, comm, 1)], [x], enable_double_backprop=True)
        F.sum(gx**2).backward()
        equal(x.grad, np.zeros(4))
    elif comm.rank == 1:
        hold, w = Variable(np.zeros(0, "f")), Variable(weights)
        y = recv(comm, 0, delegate_variable=hold)
        (again,) = chainer.grad([F.sum(w * y)], [hold], enable_double_backprop=True)
        again.backward()
        np.testing.assert_allclose(w.grad, 2 * weights, rtol=1e-12)
    nothing_is_left(comm)


@pytest.mark.sizes(2)
@WITH_THIRD_PARTY
def test_other_kinds_of_messages_are_refused_by_name(comm):
    if comm.rank == 0:
        comm.send_obj({"not": "a variable"}, 1, 4)
        comm.send(np.ones(2), 1, 4)
        for metadata in (b"", b"CMNMSG of mine", b"another"):
            comm.send_with_metadata(metadata, (np.ones(2),), 1, 4)
        send(Variable(np.ones(2)), comm, 1, tag=4).backward()
    else:
        told = r"rank 1: .*rank 0 .*tag 4, but .*got an? (obj|dict|array|ndarray)"
        for text in (
            told,
            "rank 1",
            *[r"rank 1: expected what rank 0 .*tag 4, but got metadata b'"] * 3,
        ):
            with pytest.raises(TypeError, match=text):
                recv(comm, 0, tag=4)
        F.sum(recv(comm, 0, tag=4)).backward()


@pytest.mark.sizes(2)
def test_gradients_take_no_tag_that_users_may_use(comm):
    """Not the greatest that is left, either: what users send stays theirs."""
    tag = comm.reserved_tag - 1
    if comm.rank == 0:
        x = Variable(np.ones(2, "f"))
        delegate = send(x, comm, 1, tag=tag)
        assert comm.recv(1, tag) == 5
        delegate.backward()
        equal(x.grad, np.full(2, 3, "f"))
    else:
        F.sum(recv(comm, 0, tag=tag) * 3).backward()
        comm.send(np.array(5), 0, tag)


@pytest.mark.sizes(2)
def test_a_variable_of_another_layout_raises_before_anything_is_sent(comm):
    """Its array has the axes in an order that the receiver would know nothing of."""
    if comm.rank == 0:
        x = Variable(np.ones((1, 2, 3, 4), "f")).as_layout(CUDNN_CHANNEL_LAST_X)
        with pytest.raises(RuntimeError, match="layout"):
            send(x, comm, 1)
        send(np.ones(3), comm, 1)
    else:
        assert recv(comm, 0).shape == (3,)


WRONG = [
    ("rank", 7),
    ("rank", -1),
    ("rank", "1"),
    ("tag", -1),
    ("tag", True),  # as a force_tuple too far
]


@pytest.mark.sizes(2)
def test_wrong_arguments_raise_at_once(comm):
    peer, x = 1 - comm.rank, Variable(np.ones(1, "f"))

    def raises(error, text):
        return pytest.raises(error, match=f"rank {comm.rank}: .*{text}")

    for name, value in (*WRONG, ("tag", comm.reserved_tag)):
        text = f"{name} must be an integer from 0 to .*got {value!r}"
        with raises(ValueError, text):
            send(x, comm, **{"rank": peer, name: value})
        with raises(ValueError, text):
            recv(comm, **{"rank": peer, name: value})
    with raises(ValueError, "a rank can't send to itself"):
        send(x, comm, comm.rank)
    for sent, error, text in (
        ((), ValueError, "there is nothing to send"),
        ("text", TypeError, "x must be a variable.*got str"),
        ((np.ones(1), 1.0), TypeError, "x must be a variable.*got float"),
        (
            chainer.Parameter(name="W"),
            ValueError,
            "x is a parameter that is not initialised",
        ),
    ):
        with raises(error, text):
            send(sent, comm, peer)
    with raises(TypeError, "delegate_variable must be .*got int"):
        recv(comm, peer, 3)
    with pytest.raises(TypeError, match="communicator must be a communicator, got str"):
        recv("naive", peer)
