"""With double buffering an update steps along the mean gradient of the update before it."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref

import chainer
import numpy as np
import pytest

from chainermn_comm import RankMismatchError, create_communicator
from tests.support.doubles.gpu_streams import Device, Streams
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


def train(optimizer, batches):
    for x in batches:
        optimizer.update(optimizer.target, x)


def stale_bits(comm, batches):
    """The bits of the loop that double buffering must equal."""
    expected = TanhNet(0)
    stale_loop(comm, expected, hooked_adam(expected), batches)
    return parameter_bits(expected)


# The sequence of parameters.


@pytest.mark.parametrize(
    ("dtype", "with_loss"), [("float32", True), ("float64", True), ("float32", False)]
)
def test_it_equals_a_loop_that_is_one_step_stale_bit_for_bit(every, dtype, with_loss):
    """And the training thread may communicate meanwhile."""
    with chainer.using_config("dtype", np.dtype(dtype)):
        model = TanhNet(every.rank)
        optimizer = buffered(every, model)
        random = np.random.RandomState(every.rank)
        batches = [batch_of(every.rank, number) for number in range(6)]
        if not with_loss:
            optimizer.update()  # broadcasts
        for number, x in enumerate(batches):
            time.sleep(random.uniform(0, 3e-3))
            if with_loss:
                optimizer.update(model, x)
            else:
                model.cleargrads()
                model(x).backward()
                optimizer.update()
            assert optimizer.t == number
            total = every.allreduce(np.full(1000, every.rank + number))
            expected = sum(rank + number for rank in range(every.size))
            np.testing.assert_array_equal(total, np.full(1000, expected))
        assert parameter_bits(model) == stale_bits(every, batches)
        optimizer.finalize()


# What belongs to whom.


def addresses(model):
    return {name: each.grad.ctypes.data for name, each in present(model).items()}


def present(model):
    """The parameters that have gradients."""
    return {name: it for name, it in model.namedparams() if it.grad is not None}


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
    assert not set(addresses(model).values()) & set(made.values())
    optimizer.finalize()
    for name in "/first/W", "/first/b", "/second/W":
        assert in_flight[0][name] == made[name]


def test_what_the_user_does_with_a_gradient_does_not_reach_those_in_flight(comm):
    """Views, gradients that two parameters share, and arrays that the user keeps."""
    model = TanhNet(0)
    with model.init_scope():
        model.more = chainer.Parameter(np.zeros(WIDTH, np.float32))
    optimizer = buffered(comm, model, plain_sgd)
    optimizer.assume_synchronized()
    before = model.second.W.array.copy()
    kept = np.full((3, WIDTH), comm.rank + 1, np.float32)
    model.cleargrads()
    model.first.b.grad = model.more.grad = kept[0]
    model.second.W.grad = kept
    optimizer.update()
    kept[...] = np.nan
    optimizer.flush()
    mean = (comm.size + 1) / 2
    np.testing.assert_allclose(model.more.array, -mean, rtol=1e-6)
    np.testing.assert_allclose(before - model.second.W.array, mean, rtol=1e-5)


def test_nothing_is_left_behind(world):
    """Threads end, the interpreter's interval is what it was, gradients are let go."""
    interval, threads = sys.getswitchinterval(), threading.active_count()
    sent: list[weakref.ref] = []

    def watch(grads):
        sent.extend(weakref.ref(each.grad) for each in present(grads).values())

    for comm in create_communicator("hierarchical"), WatchedCommunicator(world, watch):
        model = TanhNet(0)
        optimizer = buffered(comm, model)
        train(optimizer, [batch_of(comm.rank, number) for number in range(3)])
        optimizer.finalize()
        optimizer.finalize()
        assert threading.active_count() == threads
        assert sys.getswitchinterval() == interval
        optimizer.update(model, batch_of(0, 0))  # it can go on
        assert optimizer.t == 3
        optimizer.finalize()
        optimizer.flush()
        model.cleargrads()
        comm.finalize()
    gc.collect()
    assert sent
    assert not any(gradient() is not None for gradient in sent)


# Errors, and GPUs.


@pytest.mark.parametrize("how", [state_of, lambda optimizer: optimizer.flush()])
def test_an_error_in_flight_is_raised_by_serialize_and_by_flush(world, how):
    def fail(_):
        raise RankMismatchError("planted")

    model = TanhNet(0)
    comm = WatchedCommunicator(world)
    optimizer = buffered(comm, model)
    optimizer.update(model, batch_of(0, 0))
    optimizer.flush()
    comm.on_mean = fail
    optimizer.update(model, batch_of(0, 1))
    with pytest.raises(RankMismatchError, match="planted"):
        how(optimizer)
    comm.on_mean = lambda _: None
    optimizer.flush()
    assert optimizer.t == 1
    for _ in range(2):
        optimizer.update(model, batch_of(0, 2))
    optimizer.flush()
    assert optimizer.t > 1  # training goes on


def test_a_rank_without_gradients_makes_its_channel_for_the_others_gpu(
    world, monkeypatch
):
    """Else it would send chunks of another size than they do."""
    model, channels = TanhNet(0), []
    with create_communicator("naive", world) as comm:
        split = comm.split
        monkeypatch.setattr(
            comm, "split", lambda *how: channels.append(split(*how)) or channels[-1]
        )
        optimizer = buffered(comm, model, plain_sgd, zero_fill=True)
        optimizer.update()  # broadcasts
        model.cleargrads()
        if comm.rank == 0:
            model.first.b.grad = np.ones(WIDTH, np.float32)
        with Streams().installed():
            optimizer.update()
        optimizer.flush()
        assert [channel.get_config("chunk_bytes") for channel in channels] == [None]
        optimizer.finalize()


def without_devices(done):
    """Without the choices of a device."""
    return [each for each in done if each != "device"]


def test_on_a_gpu_the_exchange_comes_after_the_gradients_on_a_stream_of_its_own(world):
    """A double of CuPy writes down who does what in which order."""
    streams = Streams()
    model = TanhNet(0)
    comm = WatchedCommunicator(world)
    optimizer = buffered(comm, model, plain_sgd)
    optimizer.update()  # broadcasts
    before = model.first.b.array.copy()
    for number in range(2):
        model.cleargrads()
        model.first.b.grad = np.full(WIDTH, comm.rank, np.float32)
        if number == 0:
            optimizer.update()  # the first mean is taken at once
    comm.on_mean = streams.recording("exchange")
    with streams.installed():
        optimizer.update()
        optimizer.finalize()
    optimizer.flush()
    np.testing.assert_allclose(model.first.b.array, before - (comm.size - 1), rtol=1e-6)
    assert without_devices(streams.main) == ["event made", "recorded"]
    assert without_devices(streams.thread) == [
        *("stream entered", "stream waits for event", "exchange"),
        *("event made", "recorded", "stream done", "stream left"),
    ]
    streams.stream.wait_event.assert_called_once_with(streams.event)
    streams.make_stream.assert_called_once_with(non_blocking=True)
    devices = {type(call.args[0]) for call in streams.using_device.call_args_list}
    assert Device in devices
