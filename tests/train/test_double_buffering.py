"""With double buffering an update steps along the mean gradient of the update before it."""

from __future__ import annotations

import gc
import threading
import weakref

import chainer
import numpy as np
import pytest

from chainermn_comm import RankMismatchError
from tests.support.training.stale import (
    WIDTH,
    TanhNet,
    batch_of,
    buffered,
    hooked_adam,
    stale_loop,
)
from tests.support.training.trainers import parameter_bits, state_of
from tests.support.worlds.third_party import WatchedCommunicator

pytestmark = pytest.mark.world


def plain_sgd(model):
    return chainer.optimizers.SGD(1.0).setup(model)


# The sequence of parameters.


@pytest.mark.parametrize(
    ("dtype", "with_loss"), [("float64", True), ("float32", False)]
)
def test_it_equals_a_loop_that_is_one_step_stale_bit_for_bit(every, dtype, with_loss):
    """And the training thread may communicate meanwhile."""
    with chainer.using_config("dtype", np.dtype(dtype)):
        model = TanhNet(every.rank)
        optimizer = buffered(every, model)
        batches = [batch_of(every.rank, number) for number in range(6)]
        if not with_loss:
            optimizer.update()  # broadcasts
        for number, x in enumerate(batches):
            if with_loss:
                optimizer.update(model, x)
            else:
                model.cleargrads()
                model(x).backward()
                optimizer.update()
            assert optimizer.t == number
            total = every.allreduce(np.full(1000, every.rank + number))
            assert (total == sum(rank + number for rank in range(every.size))).all()
        expected = TanhNet(0)
        stale_loop(every, expected, hooked_adam(expected), batches)
        assert parameter_bits(model) == parameter_bits(expected)
        optimizer.finalize()


# What belongs to whom.


def addresses(model):
    """Where the gradients lie, by the names of parameters."""
    grads = {name: param.grad for name, param in model.namedparams()}
    return {name: it.ctypes.data for name, it in grads.items() if it is not None}


def test_gradients_are_moved_not_copied(world):
    in_flight = []
    comm = WatchedCommunicator(world, lambda grads: in_flight.append(addresses(grads)))
    model = TanhNet(0)
    optimizer = buffered(comm, model)
    optimizer.assume_synchronized()
    model.cleargrads()
    model(batch_of(0)).backward()
    made = addresses(model)
    optimizer.update()
    optimizer.finalize()
    for name in "/first/W", "/first/b", "/second/W":
        assert in_flight[0][name] == made[name]


def test_what_the_user_does_with_a_gradient_does_not_reach_those_in_flight(comm):
    """Gradients may be views, and belong to two parameters and the user."""
    model = TanhNet(0)
    optimizer = buffered(comm, model, plain_sgd)
    optimizer.assume_synchronized()
    before = model.second.W.array.copy()
    kept = np.full((4, WIDTH), comm.rank + 1, np.float32)
    model.cleargrads()
    model.first.b.grad = kept[0]
    model.second.W.grad = kept[:3]
    optimizer.update()
    kept[...] = np.nan
    optimizer.flush()
    mean = (comm.size + 1) / 2
    np.testing.assert_allclose(model.first.b.array, -mean, rtol=1e-6)
    np.testing.assert_allclose(before - model.second.W.array, mean, rtol=1e-5)


def test_nothing_is_left_behind(world):
    """Threads end, and gradients are let go."""
    threads = threading.active_count()
    sent = []

    def watch(grads):
        sent.append(weakref.ref(dict(grads.namedparams())["/first/W"].grad))

    comm = WatchedCommunicator(world, watch)
    model = TanhNet(0)
    optimizer = buffered(comm, model)
    for number in range(3):
        optimizer.update(model, batch_of(comm.rank, number))
    optimizer.finalize()
    optimizer.finalize()
    assert threading.active_count() == threads
    optimizer.update(model, batch_of(0, 0))  # it can go on
    assert optimizer.t == 3
    optimizer.flush()
    optimizer.finalize()
    model.cleargrads()
    gc.collect()
    assert [gradient() for gradient in sent] == [None] * 4


# Errors.


def test_an_error_in_flight_is_raised_by_serialize_and_then_by_all_ranks(world):
    """A save isn't collective: who catches its error has not yet told the other ranks."""

    def fail(_):
        raise RankMismatchError("planted")

    model = TanhNet(0)
    comm = WatchedCommunicator(world)
    optimizer = buffered(comm, model)
    optimizer.update(model, batch_of(0, 0))
    optimizer.flush()
    comm.on_mean = fail
    optimizer.update(model, batch_of(0, 1))
    if comm.rank == 0:
        with pytest.raises(RankMismatchError, match="planted"):
            state_of(optimizer)
    with pytest.raises(RankMismatchError, match="planted"):
        optimizer.flush()
    comm.on_mean = lambda _: None
    optimizer.flush()
    assert optimizer.t == 1
    optimizer.update(model, batch_of(0, 2))
    optimizer.flush()
    assert optimizer.t == 2  # training goes on
