"""`send`, `recv` and `pseudo_connect` between ranks, against the same graph in one process.

Every rank computes the single-process equivalent for itself, from the same random
numbers, and compares its own part of the values and gradients with it.
"""

from __future__ import annotations

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import Parameter, Variable
from numpy.testing import assert_array_equal

from chainermn_modelparallel import pseudo_connect, recv, send
from tests.support.plugins.pairwise import pairwise
from tests.support.worlds.third_party import WITH_THIRD_PARTY

# Others look on, in the full tier.
pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3), pytest.mark.ranks(2)]

FLOATS = (np.float16, np.float32, np.float64)


def matrix(r):
    return r.standard_normal((3, 4))


def fortran(r):
    return np.asfortranarray(r.standard_normal((3, 4)))


def strided(r):
    return r.standard_normal((6, 8))[::2, 1::2]


def transposed(r):
    return r.standard_normal((2, 3, 4)).transpose(2, 0, 1)


def read_only(r):
    return np.broadcast_to(r.standard_normal((4,)), (3, 4))


def of_0_d(r):
    return np.array(r.standard_normal())


def empty(r):
    return np.zeros((0, 3))


def large(r):
    return r.standard_normal((300, 400))


LAYOUTS = {
    "matrix": matrix,
    "fortran": fortran,
    "strided": strided,
    "transposed": transposed,
    "read-only": read_only,
    "0-d": of_0_d,
    "empty": empty,
    # MPI waits for the receiver with these.
    "large": large,
}


def equal(actual, desired):
    """Same dtype and bits: what travels must not change."""
    assert actual.dtype == desired.dtype
    assert_array_equal(actual, desired)


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
        send(kind([np.ones(2, "f")]), comm, 1)
    else:
        y = recv(comm, 0, force_tuple=force_tuple)
        assert isinstance(y, tuple) == force_tuple


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("tags", [(0, 0), (3, 9)])
@WITH_THIRD_PARTY
def test_gradients_find_their_send_in_whatever_order_they_come(comm, first, tags):
    """Both sends are alike, so a gradient given to the wrong one would not be noticed.

    They are so large that MPI waits for the receiver: a wait in the wrong order would
    hang.
    """
    xs = [Variable(np.ones((300, 300), "f")) for _ in tags]
    if comm.rank == 0:
        delegates = [send(x, comm, 1, tag=tag) for x, tag in zip(xs, tags, strict=True)]
        delegates[first].backward()
        delegates[1 - first].backward()
        equal(xs[0].grad, xs[0].array * 2)
        equal(xs[1].grad, xs[1].array * 6)
    elif comm.rank == 1:
        ys = [recv(comm, 0, tag=tag) for tag in tags]
        for y, factor in zip(ys, (2, 6), strict=True):
            F.sum(y * factor).backward()


@WITH_THIRD_PARTY
def test_what_needs_no_gradient_at_the_sender_sends_none_back(comm):
    """Nor do integers; both ranks know at once, from the message."""
    ones = np.ones(3, "f")
    x = Variable(ones)
    w = Variable(ones)
    fixed = Variable(ones, requires_grad=False)
    labels = Variable(np.arange(3))
    if comm.rank == 0:
        assert not send(fixed, comm, 1).requires_grad
        send((fixed, labels, x), comm, 1).backward()
        assert fixed.grad is None
        equal(x.grad, np.full(3, 5, "f"))
    elif comm.rank == 1:
        F.sum(recv(comm, 0) * w).backward()  # would wait if the gradient were sent
        equal(w.grad, ones)
        found, t, y = recv(comm, 0)
        equal(t.array, labels.array)
        assert [each.requires_grad for each in (found, t, y)] == [False, False, True]
        F.sum(found * 7 + y * 5).backward()
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


def test_the_second_derivative_ends_where_the_function_is_linear(comm):
    """The gradient w of w x doesn't depend on x, but on w; no rank waits in vain."""
    x, w, hold = [Variable(np.arange(3.0)) for _ in range(3)]
    if comm.rank == 0:
        (gx,) = chainer.grad([send(x, comm, 1)], [x], enable_double_backprop=True)
        F.sum(gx**2).backward()
        equal(x.grad, np.zeros(3))
    elif comm.rank == 1:
        y = recv(comm, 0, delegate_variable=hold)
        loss = F.sum(w * y)
        (again,) = chainer.grad([loss], [hold], enable_double_backprop=True)
        again.backward()
        equal(w.grad, 2 * w.array)
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


WRONG = [
    ({"rank": 7}, ValueError, "rank must be an integer from 0 to .*got 7"),
    ({"rank": -1}, ValueError, "rank must be"),
    ({"rank": "1"}, ValueError, "rank must be .*got '1'"),
    ({"tag": -1}, ValueError, "tag must be an integer from 0 to"),
    ({"tag": True}, ValueError, "tag must be .*got True"),  # as a force_tuple too far
    ({"communicator": "naive"}, TypeError, "communicator must be a .*, got str"),
    ({"x": ()}, ValueError, "there is nothing to send"),
    ({"x": "text"}, TypeError, "x must be a variable.*got str"),
    ({"x": (np.ones(1), 1.0)}, TypeError, "x must be a variable.*got float"),
    ({"x": Parameter(name="W")}, ValueError, "x is a parameter that is not"),
    ({"delegate_variable": 3}, TypeError, "delegate_variable must be .*got int"),
]


@pytest.mark.sizes(2)
@pytest.mark.parametrize(("wrong", "error", "text"), WRONG)
def test_wrong_arguments_raise_at_once(comm, wrong, error, text):
    arguments = {"communicator": comm, "rank": 1 - comm.rank, **wrong}
    if "x" not in wrong:
        with pytest.raises(error, match=text):
            recv(**arguments)
    if "delegate_variable" not in wrong:
        with pytest.raises(error, match=text):
            send(**{"x": np.ones(1), **arguments})


@pytest.mark.sizes(2)
def test_ranks_and_tags_that_have_another_use_raise(comm):
    with pytest.raises(ValueError, match=f"rank {comm.rank}: .* can't send to itself"):
        send(np.ones(1), comm, comm.rank)
    with pytest.raises(ValueError, match=f"rank {comm.rank}: tag must be"):
        recv(comm, 1 - comm.rank, tag=comm.reserved_tag)
