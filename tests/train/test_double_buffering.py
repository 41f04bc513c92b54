"""With double buffering an update steps along the mean gradient of the update before it."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace

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


def batches_of(comm, count):
    return [batch_of(comm.rank, number) for number in range(count)]


def train(optimizer, batches):
    for x in batches:
        optimizer.update(optimizer.target, x)


def stale_bits(comm, batches):
    """The bits of the loop that double buffering must equal."""
    expected = TanhNet(0)
    stale_loop(comm, expected, hooked_adam(expected), batches)
    return parameter_bits(expected)


# The sequence of parameters.


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_it_equals_a_loop_that_is_one_step_stale_bit_for_bit(every, dtype):
    """And the training thread may communicate meanwhile."""
    with chainer.using_config("dtype", np.dtype(dtype)):
        model = TanhNet(every.rank)
        optimizer = buffered(every, model)
        random = np.random.RandomState(every.rank)
        batches = batches_of(every, 6)
        for number, x in enumerate(batches):
            time.sleep(random.uniform(0, 3e-3))
            optimizer.update(model, x)
            assert optimizer.t == number
            assert every.allgather_obj(number) == [number] * every.size
            total = every.allreduce(np.full(1000, every.rank + number))
            expected = sum(rank + number for rank in range(every.size))
            np.testing.assert_array_equal(total, np.full(1000, expected))
        assert parameter_bits(model) == stale_bits(every, batches)
        optimizer.finalize()


def test_without_a_loss_function_it_is_the_same(comm):
    model = TanhNet(comm.rank)
    optimizer = buffered(comm, model)
    optimizer.update()  # broadcasts
    batches = batches_of(comm, 4)
    for x in batches:
        model.cleargrads()
        model(x).backward()
        optimizer.update()
    assert optimizer.t == 3
    assert parameter_bits(model) == stale_bits(comm, batches)


def test_the_wire_dtype_is_that_which_the_communicator_has_by_then(world):
    def batches(comm, dtypes):
        for number, dtype in enumerate(dtypes):
            comm.set_config("allreduce_grad_dtype", dtype)
            yield batch_of(comm.rank, number)

    ends = []
    with create_communicator("flat", world) as comm:
        for dtypes in (None, None, None, None), (None, "float16", None, "float64"):
            optimizer = buffered(comm, TanhNet(comm.rank))
            train(optimizer, batches(comm, dtypes))
            ends.append(parameter_bits(optimizer.target))
            assert ends[-1] == stale_bits(comm, batches(comm, dtypes))
            optimizer.finalize()
    assert ends[0] != ends[1]


# What belongs to whom.


def addresses(model):
    named = model.namedparams()
    return {
        name: param.grad.ctypes.data for name, param in named if param.grad is not None
    }


@pytest.mark.parametrize("with_loss", [False, True])
def test_gradients_are_moved_not_copied(world, with_loss):
    in_flight, made, read_only = [], [], []
    comm = WatchedCommunicator(world, lambda grads: in_flight.append(addresses(grads)))
    model = TanhNet(0)
    optimizer = buffered(comm, model)
    train(optimizer, batches_of(comm, 1))
    optimizer.flush()

    def backward(loss, **how):
        loss.backward(**how)
        made.append(addresses(model))
        read_only.append(not model.second.b.grad.flags.writeable)

    if with_loss:  # looked at when its backward is over
        optimizer.update(
            lambda x: SimpleNamespace(backward=partial(backward, model(x))), batch_of(0)
        )
        assert not set(addresses(model).values()) & set(made[0].values())
    else:
        model.cleargrads()
        backward(model(batch_of(0)))
        optimizer.update()
    optimizer.flush()
    moved = {name for name, address in made[0].items() if in_flight[1][name] == address}
    assert {"/first/W", "/first/b", "/second/W"} <= moved
    assert "/second/b" not in moved or not read_only[0]
    optimizer.finalize()


def test_what_the_user_does_with_a_gradient_does_not_reach_those_in_flight(comm):
    """Views, gradients that two parameters share, and arrays that the user keeps."""
    results = []
    for spoil in False, True:
        model = TanhNet(0)
        a, b = model.first.b, chainer.Parameter(np.zeros(WIDTH, np.float32))
        with model.init_scope():
            model.more = b
        optimizer = buffered(comm, model, plain_sgd)
        optimizer.update()
        memory = np.full(2 * WIDTH, comm.rank + 1, np.float32)
        kept = np.full((3, WIDTH), comm.rank + 2, np.float32)
        model.cleargrads()
        a.grad = b.grad = memory[:WIDTH]
        model.second.W.grad = kept
        optimizer.update()
        if spoil:
            memory[...] = kept[...] = np.nan
        optimizer.flush()
        results.append(parameter_bits(model))
        mean = (comm.size + 1) / 2
        np.testing.assert_allclose(model.more.array, np.full(WIDTH, -mean), rtol=1e-6)
    assert results[0] == results[1]


def test_copies_go_their_own_ways_at_the_same_time(comm):
    optimizer = buffered(comm, TanhNet(comm.rank))
    batches = batches_of(comm, 5)
    train(optimizer, batches[:2])
    twin = copy.deepcopy(optimizer)
    assert copy.copy(optimizer).target is optimizer.target
    for x, y in zip(batches[2:], batches[:1:-1], strict=True):
        train(optimizer, [x])
        train(twin, [y])
    assert parameter_bits(optimizer.target) == stale_bits(comm, batches)
    assert parameter_bits(twin.target) == stale_bits(comm, batches[:2] + batches[:1:-1])


def test_nothing_is_left_behind(world):
    """Threads end, the interpreter's interval is what it was, gradients are let go."""
    interval, threads = sys.getswitchinterval(), threading.active_count()
    sent: list[weakref.ref] = []

    def watch(grads):
        sent.extend(
            weakref.ref(p.grad) for _, p in grads.namedparams() if p.grad is not None
        )

    for comm in create_communicator("hierarchical"), WatchedCommunicator(world, watch):
        model = TanhNet(0)
        optimizer = buffered(comm, model)
        train(optimizer, batches_of(comm, 3))
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


# What fails in flight.


@pytest.mark.sizes(2, 3, 4)
def test_gradients_that_do_not_fit_are_not_sent(naive):
    model = TanhNet(0)
    optimizer = buffered(naive, model, zero_fill=False)
    optimizer.update(model, batch_of(0, 0))
    optimizer.update(model, batch_of(0, 1))
    optimizer.flush()
    assert optimizer.t == 2
    before = parameter_bits(model)
    model.cleargrads()
    if naive.rank == 0:
        model.first.b.grad = np.ones(WIDTH, np.float32)
    with pytest.raises(RankMismatchError, match="/first/b"):
        optimizer.update()
    assert optimizer.t == 2
    assert parameter_bits(model) == before
    for t in 2, 3:  # it starts anew
        optimizer.update(model, batch_of(0, 3))
        assert optimizer.t == t


def test_an_error_in_flight_is_raised_by_flush_and_by_serialize(world):
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
        state_of(optimizer)
    with pytest.raises(RankMismatchError, match="planted"):
        optimizer.flush()
    optimizer.flush()
    assert optimizer.t == 1


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
    assert streams.main[:4] == ["device", "device", "event made", "recorded"]
    assert set(streams.main[4:]) == {"device"}  # where the step computes
    assert streams.thread == [
        *("device", "stream entered", "stream waits for event", "exchange"),
        *("event made", "recorded", "stream done", "stream left"),
    ]
    streams.stream.wait_event.assert_called_once_with(streams.event)
    streams.make_stream.assert_called_once_with(non_blocking=True)
    assert Device in {
        type(call.args[0]) for call in streams.using_device.call_args_list
    }
