"""`send`, `recv` and `pseudo_connect` between ranks, against the same graph in one process.

Every rank computes the single-process equivalent for itself, from the same random numbers, and
compares its own part of the values and gradients with it.
"""

from __future__ import annotations

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import Variable
from chainer.memory_layouts import CUDNN_CHANNEL_LAST_X

from chainermn_modelparallel import pseudo_connect, recv, send
from tests.support.pairwise import pairwise
from tests.support.third_party import WITH_STRANGER

pytestmark = [pytest.mark.world, pytest.mark.ranks(2)]  # others look on, in the full tier

FLOATS = (np.float16, np.float32, np.float64)
LAYOUTS = {
    "matrix": lambda r: r.standard_normal((3, 4)),
    "fortran": lambda r: np.asfortranarray(r.standard_normal((3, 4))),
    "strided": lambda r: r.standard_normal((6, 8))[::2, 1::2],
    "transposed": lambda r: r.standard_normal((2, 3, 4)).transpose(2, 0, 1),
    "read-only": lambda r: np.broadcast_to(r.standard_normal((4,)), (3, 4)),
    "0-d": lambda r: np.array(r.standard_normal()),
    "empty": lambda r: np.zeros((0, 3)),
    "large": lambda r: r.standard_normal((300, 400)),  # MPI waits for the receiver with these
}


def equal(actual, desired):
    """Same dtype and bits: what travels must not change."""
    assert actual.dtype == desired.dtype
    np.testing.assert_array_equal(actual, desired)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(
    *pairwise(comm=["naive", "stranger"], layout=LAYOUTS, dtype=FLOATS).args, indirect=["comm"]
)
def test_any_float_array_goes_there_and_its_gradient_back(comm, random, dtype, layout):
    data = LAYOUTS[layout](random)
    data = data if data.dtype == dtype else data.astype(dtype)
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


@pytest.mark.sizes(2, 3)
@pytest.mark.ranks(3)
def test_a_chain_through_all_ranks_equals_one_process(comm, random):
    links = [
        chainer.links.Linear(4, 4, initialW=random.standard_normal((4, 4)).astype("f"))
        for _ in range(comm.size)
    ]
    x = random.standard_normal((5, 4)).astype("f")

    for link in links:
        link.cleargrads()  # which are NaN, equal to any other
    alone = [link.copy(mode="copy") for link in links]
    h = x
    for link in alone:
        h = F.tanh(link(h))
    F.sum(h * h).backward()

    link = links[comm.rank]
    h = F.tanh(link(x if comm.rank == 0 else recv(comm, comm.rank - 1)))
    last = comm.rank == comm.size - 1
    (F.sum(h * h) if last else send(h, comm, comm.rank + 1)).backward()
    assert np.all(np.isfinite(link.W.grad))
    equal(link.W.grad, alone[comm.rank].W.grad)
    equal(link.b.grad, alone[comm.rank].b.grad)


@pytest.mark.sizes(2, 3)
def test_ping_pong_is_connected_by_the_delegate(comm, random):
    """0 -> 1 -> 0: one backward on rank 0 visits both of its parts."""
    x = random.standard_normal((3, 2)).astype("d")
    w = random.standard_normal((3, 2)).astype("d")
    alone_x, alone_w = Variable(x), Variable(w)
    F.sum(F.tanh(F.exp(alone_x) * alone_w) ** 2).backward()
    if comm.rank == 0:
        mine = Variable(x)
        delegate = send(F.exp(mine), comm, 1)
        y = recv(comm, 1, delegate_variable=delegate)
        F.sum(F.tanh(y) ** 2).backward()
        equal(mine.grad, alone_x.grad)
    elif comm.rank == 1:
        mine = Variable(w)
        send(recv(comm, 0) * mine, comm, 0).backward()
        equal(mine.grad, alone_w.grad)


@pytest.mark.sizes(3)
@pytest.mark.ranks(3)
def test_a_ring_passes_two_ranks_and_returns(comm, random):
    x = random.standard_normal(4).astype("d")
    alone = Variable(x)
    F.sum(F.sin(F.exp(alone) * 2) ** 2).backward()
    if comm.rank == 0:
        mine = Variable(x)
        y = recv(comm, 2, delegate_variable=send(F.exp(mine), comm, 1))
        F.sum(y**2).backward()
        equal(mine.grad, alone.grad)
    elif comm.rank == 1:
        send(recv(comm, 0) * 2, comm, 2).backward()
    else:
        send(F.sin(recv(comm, 1)), comm, 0).backward()


@pytest.mark.sizes(2, 3)
@WITH_STRANGER
def test_tuples_of_different_shapes_and_dtypes(comm, random):
    data = (
        random.standard_normal((2, 3)).astype(np.float16),
        random.standard_normal(()).astype(np.float64),
        random.standard_normal((4, 0)).astype(np.float32),
        random.standard_normal(5).astype(np.float32),
    )
    if comm.rank == 0:
        xs = tuple(Variable(array) for array in data)
        send(xs, comm, 1, tag=5).backward()
        for number, x in enumerate(xs):
            equal(x.grad, np.full_like(data[number], number + 1))
    elif comm.rank == 1:
        ys = recv(comm, 0, tag=5)
        assert isinstance(ys, tuple)
        for y, array in zip(ys, data, strict=True):
            equal(y.array, array)
        chainer.backward(ys, [Variable(np.full_like(a, n + 1)) for n, a in enumerate(data)])


@pytest.mark.sizes(2)
@pytest.mark.parametrize("force_tuple", [False, True])
@pytest.mark.parametrize("sent_as", [lambda x: x, lambda x: (x,), lambda x: [x]])
def test_one_variable_is_a_tuple_only_if_forced(comm, sent_as, force_tuple):
    if comm.rank == 0:
        x = Variable(np.ones(2, "f"))
        send(sent_as(x), comm, 1).backward()
        equal(x.grad, np.full(2, 3, "f"))
    else:
        y = recv(comm, 0, force_tuple=force_tuple)
        assert isinstance(y, tuple) == force_tuple
        F.sum((y[0] if force_tuple else y) * 3).backward()


@pytest.mark.sizes(2, 3)
def test_an_unused_output_of_a_tuple_has_a_gradient_of_zeros(comm, random):
    """And backward still reaches what lies before it, on other ranks too."""
    data = random.standard_normal((2, 3)).astype("d")
    if comm.rank == 0:
        used, unused = Variable(data), Variable(data.astype(np.float16))
        before = unused * 1
        send((used, before), comm, 1).backward(retain_grad=True)
        equal(used.grad, np.full_like(data, 2))
        equal(before.grad, np.zeros_like(unused.array))
        equal(unused.grad, np.zeros_like(unused.array))
    elif comm.rank == 1:
        F.sum(recv(comm, 0)[0] * 2).backward()


@pytest.mark.sizes(3)
@pytest.mark.ranks(3)
def test_an_unused_output_does_not_leave_the_rank_before_waiting(comm):
    if comm.rank == 0:
        x = Variable(np.ones(3, "f"))
        send(x, comm, 1).backward()
        equal(x.grad, np.zeros(3, "f"))
    elif comm.rank == 1:
        w = Variable(np.ones(3, "f"))
        send((recv(comm, 0) * 2, w), comm, 2).backward()
        equal(w.grad, np.ones(3, "f"))
    else:
        F.sum(recv(comm, 1)[1]).backward()


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("tags", [(0, 0), (3, 9)])
@WITH_STRANGER
def test_gradients_find_their_send_in_whatever_order_they_come(comm, random, first, tags):
    """Both sends are alike, so a gradient given to the wrong one would not be noticed."""
    # Large enough for MPI to wait for the receiver: a wait in the wrong order would hang.
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
        losses = [F.sum(ys[0] ** 2), F.sum(3 * ys[1] ** 2)]
        losses[0].backward()
        losses[1].backward()


@pytest.mark.sizes(2, 3)
def test_the_delegates_of_two_sends_are_connected(comm):
    if comm.rank == 0:
        xs = [Variable(np.ones(2)) for _ in range(2)]
        pseudo_connect(*[send(x, comm, 1) for x in xs]).backward()
        for number, x in enumerate(xs):
            equal(x.grad, np.full(2, number + 2.0))
    elif comm.rank == 1:
        a, b = recv(comm, 0), recv(comm, 0)
        (F.sum(a * 2) + F.sum(b * 3)).backward()


@pytest.mark.sizes(2, 3)
def test_several_sends_are_connected_by_pseudo_connect(comm, random):
    data = random.standard_normal((3, 4)).astype("d")
    alone = [Variable(array) for array in data]
    (F.sum(alone[0] * 2) + F.sum((alone[1] * 3) ** 2) + F.sum(alone[2] ** 2)).backward()
    if comm.rank == 0:
        xs = [Variable(array) for array in data]
        first = send(xs[0] * 2, comm, 1)
        second = send(pseudo_connect(first, xs[1] * 3), comm, 1)
        loss = pseudo_connect(second, F.sum(xs[2] ** 2))
        assert loss.array == np.sum(data[2] ** 2)
        loss.backward()
        for mine, other in zip(xs, alone, strict=True):
            equal(mine.grad, other.grad)
    elif comm.rank == 1:
        a, b = recv(comm, 0), recv(comm, 0)
        (F.sum(a) + F.sum(b**2)).backward()


@pytest.mark.sizes(2, 3)
@WITH_STRANGER
def test_integers_arrive_and_have_no_gradient(comm):
    """Nobody waits for one either: both ranks know at once, from the message."""
    labels = np.array([1, 0, 2], np.int32)
    if comm.rank == 0:
        send(labels, comm, 1)
        x = Variable(np.ones((3, 3), "f"))
        send((x, Variable(labels), Variable(np.array([True, False]))), comm, 1).backward()
        assert x.grad.any()
        delegate = send(Variable(labels), comm, 1)
        delegate.backward()
    elif comm.rank == 1:
        alone = recv(comm, 0)
        equal(alone.array, labels)
        assert not alone.requires_grad
        x, t, mask = recv(comm, 0)
        equal(mask.array, np.array([True, False]))
        assert not t.requires_grad
        F.softmax_cross_entropy(x, t).backward()
        assert not recv(comm, 0).requires_grad


@pytest.mark.sizes(2, 3)
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


@pytest.mark.sizes(2, 3)
def test_no_backprop_mode_sends_no_gradients(comm):
    data = np.ones(3, "f")
    if comm.rank == 0:
        with chainer.no_backprop_mode():
            send(Variable(data), comm, 1)
    elif comm.rank == 1:
        y = recv(comm, 0)
        assert not y.requires_grad
    if comm.rank < 2:
        with chainer.no_backprop_mode():
            if comm.rank == 0:
                delegate = send(Variable(data), comm, 1)
                delegate.backward()
            else:
                y = recv(comm, 0, delegate_variable=Variable(np.zeros(2, "f")))
                F.sum(y).backward()
    nothing_is_left(comm)


def nothing_is_left(comm):
    """No message that nobody received lies between ranks 0 and 1, in either direction."""
    if comm.rank < 2:
        comm.send_obj("last", 1 - comm.rank, 32766)
        assert comm.recv_obj(1 - comm.rank, 32766) == "last"


@pytest.mark.sizes(2, 3)
def test_the_delegate_is_reached_through_what_has_no_gradient(comm):
    """Labels that come after a send keep the path to it, once they are connected."""
    if comm.rank == 0:
        x = Variable(np.ones(2, "f"))
        delegate = send(x, comm, 1)
        labels = recv(comm, 1, delegate_variable=delegate)
        pseudo_connect(labels, Variable(np.array(1.0, "f"))).backward()
        equal(x.grad, np.full(2, 4, "f"))
    elif comm.rank == 1:
        x = recv(comm, 0)
        send(np.arange(3), comm, 0)
        F.sum(x * 4).backward()


@pytest.mark.sizes(2, 3)
def test_one_received_variable_used_twice_sends_one_sum(comm):
    if comm.rank == 0:
        x = Variable(np.array([1.0, 2.0]))
        send(x, comm, 1).backward()
        equal(x.grad, np.array([5.0, 7.0]))
    elif comm.rank == 1:
        y = recv(comm, 0)
        F.sum(y * y + 3 * y).backward()
    nothing_is_left(comm)


@pytest.mark.sizes(2, 3)
def test_one_variable_sent_twice_adds_up(comm):
    if comm.rank == 0:
        x = Variable(np.array([1.0, 2.0]))
        send((x, x), comm, 1).backward()
        equal(x.grad, np.array([5.0, 5.0]))
    elif comm.rank == 1:
        a, b = recv(comm, 0)
        F.sum(2 * a + 3 * b).backward()


@pytest.mark.sizes(2, 3)
def test_chainer_grad_goes_through_send(comm):
    if comm.rank == 0:
        x = Variable(np.array([1.0, 2.0]))
        (gx,) = chainer.grad([send(x, comm, 1)], [x])
        equal(gx.array, np.array([3.0, 12.0]))
    elif comm.rank == 1:
        F.sum(recv(comm, 0) ** 3).backward()


@pytest.mark.sizes(2, 3)
def test_training_step_after_step_equals_one_process(comm, random):
    """Twenty updates of a model that is cut in two, with Adam on both halves."""
    layers = [
        chainer.links.Linear(3, 3, initialW=random.standard_normal((3, 3)).astype("d"))
        for _ in range(2)
    ]
    for layer in layers:
        layer.b = chainer.Parameter(np.zeros(3, "d"))
    batches = random.standard_normal((20, 5, 3))

    def step(link, loss):
        link.cleargrads()
        loss.backward()

    alone = chainer.ChainList(*[layer.copy(mode="copy") for layer in layers])
    optimizer = chainer.optimizers.Adam(0.1).setup(alone)
    for x in batches:
        step(alone, F.sum(alone[1](F.tanh(alone[0](x))) ** 2))
        optimizer.update()
    if comm.rank == 2:
        return
    layer = layers[comm.rank]
    optimizer = chainer.optimizers.Adam(0.1).setup(layer)
    for x in batches:
        if comm.rank == 0:
            step(layer, send(F.tanh(layer(x)), comm, 1))
        else:
            step(layer, F.sum(layer(recv(comm, 0)) ** 2))
        optimizer.update()
    equal(layer.W.array, alone[comm.rank].W.array)
    equal(layer.b.array, alone[comm.rank].b.array)


@pytest.mark.sizes(2, 3)
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
@pytest.mark.parametrize("megabytes", [10, pytest.param(100, marks=pytest.mark.full)])
def test_many_megabytes_there_and_back(comm, megabytes):
    """One after the other: in pieces, and MPI takes none before it is received."""
    n = megabytes << 18
    if comm.rank == 0:
        x = Variable(np.arange(n, dtype="f"))
        y = recv(comm, 1, delegate_variable=send(x, comm, 1))
        y.grad = y.array
        y.backward()
        equal(x.grad, x.array)
    else:
        y = recv(comm, 0)
        equal(y.array[:: n // 7], np.arange(0, n, n // 7, dtype="f"))
        send(y, comm, 0).backward()


@pytest.mark.sizes(2)
@WITH_STRANGER
def test_another_kind_of_message_is_refused_by_name(comm):
    if comm.rank == 0:
        comm.send_obj({"not": "a variable"}, 1, 4)
        comm.send(np.ones(2), 1, 4)
        x = Variable(np.ones(2))
        send(x, comm, 1, tag=4).backward()
    else:
        with pytest.raises(
            TypeError, match=r"rank 1: .*rank 0 .*tag 4, but .*got an? (obj|dict|array|ndarray)"
        ):
            recv(comm, 0, tag=4)
        with pytest.raises(TypeError, match="rank 1"):
            recv(comm, 0, tag=4)
        F.sum(recv(comm, 0, tag=4)).backward()


@pytest.mark.sizes(2)
@WITH_STRANGER
def test_a_note_of_somebody_elses_is_refused_by_name(comm):
    if comm.rank == 0:
        for note in (b"", b"letter of mine", b"another"):
            comm.send_noted(note, (np.ones(2),), 1, 4)
    else:
        for _ in range(3):
            with pytest.raises(TypeError, match=r"rank 1: expected what rank 0 .*tag 4, got b'"):
                recv(comm, 0, tag=4)


@pytest.mark.sizes(2)
@pytest.mark.parametrize("several", [False, True])
def test_a_variable_of_another_layout_raises_before_anything_is_sent(comm, several):
    """Its array has the axes in an order that the receiver would know nothing of."""
    if comm.rank == 0:
        x = Variable(np.ones((1, 2, 3, 4), "f")).as_layout(CUDNN_CHANNEL_LAST_X)
        with pytest.raises(RuntimeError, match="layout"):
            send((x, x) if several else x, comm, 1)
        send(np.ones(3), comm, 1)
    else:
        assert recv(comm, 0).shape == (3,)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"rank": 7}, ValueError, "there is no rank 7; ranks go from 0 to"),
        ({"rank": -1}, ValueError, "there is no rank -1"),
        ({"rank": "1"}, TypeError, "rank must be an integer, got str"),
        ({"rank": 1.0}, TypeError, "rank must be an integer, got float"),
        ({"rank": None}, TypeError, "rank must be an integer, got NoneType"),
        ({"tag": -1}, ValueError, "tag must be 0 or more"),
        ({"tag": 32766}, ValueError, "gradients take"),
        ({"tag": 0.5}, TypeError, "tag must be an integer, got float"),
        ({"tag": True}, TypeError, "tag must be an integer, got bool"),  # as a force_tuple too far
        ({"rank": True}, TypeError, "rank must be an integer, got bool"),
    ],
)
def test_wrong_ranks_and_tags_raise_at_once(comm, arguments, error, text):
    peer = {"rank": (comm.rank + 1) % comm.size, **arguments}
    for call in (lambda: send(Variable(np.ones(1, "f")), comm, **peer), lambda: recv(comm, **peer)):
        with pytest.raises(error, match=f"rank {comm.rank}: .*{text}"):
            call()


@pytest.mark.sizes(2)
def test_other_wrong_arguments_raise_at_once(comm):
    peer, mine = 1 - comm.rank, f"rank {comm.rank}: "
    with pytest.raises(ValueError, match=f"{mine}a rank can't send to itself"):
        send(Variable(np.ones(1, "f")), comm, comm.rank)
    with pytest.raises(ValueError, match=f"{mine}there is nothing to send"):
        send((), comm, peer)
    with pytest.raises(TypeError, match=f"{mine}x must be a variable.*got str"):
        send("text", comm, peer)
    with pytest.raises(TypeError, match=f"{mine}x must be a variable.*got float"):
        send((np.ones(1), 1.0), comm, peer)
    with pytest.raises(ValueError, match=f"{mine}W is not initialised"):
        send(chainer.Parameter(name="W"), comm, peer)
    with pytest.raises(TypeError, match=f"{mine}delegate_variable must be .*got int"):
        recv(comm, peer, 3)
    with pytest.raises(TypeError, match="communicator must be a communicator, got int"):
        send(Variable(np.ones(1, "f")), peer, comm)
    with pytest.raises(TypeError, match="communicator must be a communicator, got str"):
        recv("naive", peer)  # type: ignore[arg-type]
