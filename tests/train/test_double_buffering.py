"""With double buffering an update steps along the mean gradient of the update before it."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import numpy as np
import pytest
from chainer import using_config
from chainer.optimizers import SGD
from numpy.testing import assert_allclose

from chainermn_comm import RankMismatchError
from tests.support.training.small_models import (
    WIDTH,
    TanhNet,
    batch_of,
    buffered,
    hooked_adam,
)
from tests.support.training.trainers import parameter_bits, state_of
from tests.support.worlds.third_party import WatchedCommunicator

pytestmark = pytest.mark.world


def plain_sgd(model):
    return SGD(1.0).setup(model)


def stale_loop(comm, model, optimizer, batches):
    """What double buffering must equal: each step uses the mean gradients of the step before."""
    before = None
    for x in batches:
        model.cleargrads()
        model(x).backward()
        comm.multi_node_mean_grad(model, True)
        now = {name: copy.copy(param.grad) for name, param in model.namedparams()}
        if before is not None:
            for name, param in model.namedparams():
                param.grad = before[name]
            optimizer.update()
        before = now


# The sequence of parameters.


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_it_equals_a_loop_that_is_one_step_stale_bit_for_bit(every, dtype):
    """And the training thread may communicate meanwhile."""
    with using_config("dtype", np.dtype(dtype)):
        model = TanhNet(every.rank)
        optimizer = buffered(every, model)
        batches = [batch_of(every.rank, number) for number in range(6)]
        for number, x in enumerate(batches):
            optimizer.update(model, x)
            assert optimizer.t == number
            total = every.allreduce(np.full(1000, number))
            assert (total == number * every.size).all()
        expected = TanhNet(0)
        stale_loop(every, expected, hooked_adam(expected), batches)
        assert parameter_bits(model) == parameter_bits(expected)
        optimizer.finalize()


# What belongs to whom.


def gradient_of(model):
    return dict(model.namedparams())["/first/W"].grad


def test_gradients_are_moved_not_copied(world):
    addresses = []

    def note(model):
        addresses.append(gradient_of(model).ctypes.data)

    model = TanhNet(0)
    optimizer = buffered(WatchedCommunicator(world, note), model)
    optimizer.assume_synchronized()
    model.cleargrads()
    model(batch_of(0)).backward()
    note(model)
    optimizer.update()
    optimizer.finalize()
    assert addresses[0] == addresses[1]


def test_what_the_user_does_with_a_gradient_does_not_reach_those_in_flight(comm):
    """Gradients may be views, and belong to two parameters and the user."""
    model = TanhNet(0)
    model.second.W.array[...] = 0
    optimizer = buffered(comm, model, plain_sgd)
    optimizer.assume_synchronized()
    kept = np.full((4, WIDTH), comm.rank + 1, np.float32)
    model.cleargrads()
    model.first.b.grad = kept[0]
    model.second.W.grad = kept[:3]
    optimizer.update()
    kept[...] = np.nan
    optimizer.flush()
    mean = (comm.size + 1) / 2
    for param in model.first.b, model.second.W:
        assert_allclose(param.array, -mean, rtol=1e-6)


def test_nothing_is_left_behind(world):
    """Threads end, and gradients are let go."""
    threads = threading.active_count()
    sent = []

    def watch(grads):
        sent.append(weakref.ref(gradient_of(grads)))

    model = TanhNet(0)
    optimizer = buffered(WatchedCommunicator(world, watch), model)
    for number in range(4):
        optimizer.update(model, batch_of(number))
        assert optimizer.t == number
        optimizer.finalize()  # it can go on
        assert threading.active_count() == threads
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
    optimizer.update(model, batch_of(0, 2))
    optimizer.flush()
    assert optimizer.t == 2  # training goes on
