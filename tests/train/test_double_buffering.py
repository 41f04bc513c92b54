"""With double buffering an update steps along the mean gradient of the update before it."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer.training import extensions

from chainermn_comm import create_communicator
from chainermn_train import create_multi_node_evaluator
from tests.support.stale import (
    BATCH,
    WIDTH,
    TanhNet,
    batch_of,
    buffered,
    hooked_adam,
    stale_loop,
)
from tests.support.third_party import WatchedCommunicator
from tests.support.training import parameter_bits, parameters, same_everywhere, trainer_over

pytestmark = pytest.mark.world


def plain_sgd(model):
    return chainer.optimizers.SGD(1.0).setup(model)


def stale_bits(comm, batches, *scales):
    """The bits of the loop that double buffering must equal."""
    expected = TanhNet(0)
    stale_loop(comm, expected, hooked_adam(expected), batches, *scales)
    return parameter_bits(expected)


# The sequence of parameters.


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_it_equals_a_loop_that_is_one_step_stale_bit_for_bit(every, dtype):
    with chainer.using_config("dtype", np.dtype(dtype)):
        model = TanhNet(every.rank)
        optimizer = buffered(every, model)
        random = np.random.RandomState(every.rank)
        batches = [batch_of(every.rank, number) for number in range(6)]
        for number, x in enumerate(batches):
            time.sleep(random.uniform(0, 3e-3))
            optimizer.update(model, x)
            assert optimizer.t == number
        assert parameter_bits(model) == stale_bits(every, batches)
        optimizer.finalize()


def test_without_a_loss_function_it_is_the_same(comm):
    model = TanhNet(comm.rank)
    optimizer = buffered(comm, model)
    optimizer.update()  # broadcasts
    batches = [batch_of(comm.rank, number) for number in range(4)]
    for x in batches:
        model.cleargrads()
        model(x).backward()
        optimizer.update()
    assert optimizer.t == 3
    assert parameter_bits(model) == stale_bits(comm, batches)


def test_lazily_initialised_links_start_one_update_later(comm):
    model = TanhNet(comm.rank, None)
    optimizer = buffered(comm, model)
    for t in 0, 0, 1, 2:
        optimizer.update(model, batch_of(comm.rank, 0))
        assert optimizer.t == t
    assert same_everywhere(comm, model)


@pytest.mark.parametrize("where", ["everywhere", "rank 0", "last rank"])
def test_gradients_in_flight_do_not_move_a_link_that_has_replaced_theirs(comm, where):
    model = TanhNet(comm.rank)
    optimizer = buffered(comm, model, plain_sgd)
    optimizer.update(model, batch_of(comm.rank, 0))
    before = parameters(model)
    ranks = {"everywhere": range(comm.size), "rank 0": [0], "last rank": [comm.size - 1]}[where]
    if comm.rank in ranks:
        del model.second
        with model.init_scope():
            model.second = L.Linear(WIDTH, 3, initialW=0.5, initial_bias=0.25)
        for param in model.second.params():
            param.update_rule = optimizer.create_update_rule()
    optimizer.update(model, batch_of(comm.rank, 1))
    assert optimizer.t == 1
    assert not np.array_equal(model.first.W.array, before["/first/W"])  # moved, as ever
    if 0 in ranks:
        np.testing.assert_array_equal(model.second.W.array, np.full((3, WIDTH), 0.5))
    else:  # they got rank 0's, whose gradients these are
        assert not np.array_equal(model.second.W.array, before["/second/W"])
    optimizer.update(model, batch_of(comm.rank, 2))
    assert same_everywhere(comm, model)


def test_each_gradient_is_undone_the_loss_scale_it_was_made_with(comm):
    scales = [1.0, 4096.0, 2.0, 512.0, 512.0]  # powers of two: undone without rounding
    batches = [batch_of(comm.rank, number) for number in range(len(scales))]

    def scaled(make):
        model = TanhNet(comm.rank)
        optimizer = buffered(comm, model, make)
        for scale, x in zip(scales, batches, strict=True):
            optimizer.set_loss_scale(scale)
            optimizer.update(model, x)
        return model

    assert parameter_bits(scaled(hooked_adam)) == stale_bits(comm, batches, scales)
    # And without hooks that see the scaled gradients it is as if there were no scale.
    expected = TanhNet(0)
    stale_loop(comm, expected, chainer.optimizers.SGD(0.1).setup(expected), batches)
    found = parameters(scaled(lambda model: chainer.optimizers.SGD(0.1).setup(model)))
    for name, array in parameters(expected).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-7)


def test_the_wire_dtype_is_that_which_the_communicator_has_by_then(world):
    def batches(comm, dtypes):
        for number, dtype in enumerate(dtypes):
            comm.set_config("allreduce_grad_dtype", dtype)
            yield batch_of(comm.rank, number)

    ends = []
    with create_communicator("flat", world) as comm:
        for dtypes in (None, None, None, None), (None, "float16", None, "float64"):
            model = TanhNet(comm.rank)
            optimizer = buffered(comm, model)
            for x in batches(comm, dtypes):
                optimizer.update(model, x)
            assert parameter_bits(model) == stale_bits(comm, batches(comm, dtypes))
            ends.append(parameter_bits(model))
            optimizer.finalize()
    assert ends[0] != ends[1]


def test_in_a_trainer_with_an_evaluator(every, tmp_path):
    model = TanhNet(every.rank)
    optimizer = buffered(every, model)
    batches = [batch_of(every.rank, number) for number in range(3)]
    trainer = trainer_over(np.concatenate(batches), BATCH, optimizer, 8, tmp_path)

    class Report(chainer.Chain):
        def __call__(self, x):
            chainer.report({"loss": model(x)}, self)

    examples = chainer.datasets.TupleDataset(batches[0])
    iterator = chainer.iterators.SerialIterator(examples, BATCH, repeat=False, shuffle=False)
    evaluator = create_multi_node_evaluator(extensions.Evaluator(iterator, Report()), every)
    trainer.extend(evaluator, trigger=(1, "iteration"))
    trainer.run()
    assert optimizer.t == 7
    (mean,) = [value for key, value in trainer.observation.items() if key.endswith("loss")]
    assert every.allgather_obj(float(mean)) == [float(mean)] * every.size
    assert parameter_bits(model) == stale_bits(every, [batches[n % 3] for n in range(8)])
    optimizer.finalize()


# What belongs to whom.


def addresses(model):
    return {
        name: param.grad.ctypes.data
        for name, param in model.namedparams()
        if param.grad is not None
    }


@pytest.mark.parametrize("with_loss", [False, True])
def test_gradients_are_moved_not_copied(world, with_loss):
    in_flight: list[dict[str, int]] = []
    comm = WatchedCommunicator(world, lambda grads: in_flight.append(addresses(grads)))
    model = TanhNet(0)
    optimizer = buffered(comm, model)
    optimizer.update(model, batch_of(0, 0))
    optimizer.flush()
    seen: dict[str, int] = {}
    read_only = []

    class Look:
        """A loss after whose backward the model's gradients are looked at."""

        def __init__(self, loss):
            self.loss = loss

        def backward(self, **kwds):
            self.loss.backward(**kwds)
            seen.update(addresses(model))
            read_only.append(not model.second.b.grad.flags.writeable)

    if with_loss:
        optimizer.update(lambda x: Look(model(x)), batch_of(0, 1))
        assert all(param.grad is None for param in model.params())
    else:
        model.cleargrads()
        Look(model(batch_of(0, 1))).backward()
        optimizer.update()
    optimizer.flush()
    moved = {name for name in seen if in_flight[1][name] == seen[name]}
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


def test_the_training_thread_may_communicate_meanwhile(every):
    model = TanhNet(every.rank)
    optimizer = buffered(every, model)
    for number in range(10):
        optimizer.update(model, batch_of(every.rank, 0))
        total = every.allreduce(np.full(1000, every.rank + number))
        expected = sum(rank + number for rank in range(every.size))
        np.testing.assert_array_equal(total, np.full(1000, expected))
        assert every.allgather_obj(number) == [number] * every.size
    optimizer.finalize()


def test_two_optimizers_can_be_in_flight_at_the_same_time(comm):
    batches = [batch_of(comm.rank, number) for number in range(4)]
    models = [TanhNet(comm.rank), TanhNet(comm.rank)]
    optimizers = [buffered(comm, model) for model in models]
    for number in range(4):
        for turn, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.update(model, batches[number - turn])
    for turn, model in enumerate(models):
        own = [batches[number - turn] for number in range(4)]
        assert parameter_bits(model) == stale_bits(comm, own)


def test_copies_go_their_own_ways(comm):
    model = TanhNet(comm.rank)
    optimizer = buffered(comm, model)
    batches = [batch_of(comm.rank, number) for number in range(5)]
    for x in batches[:2]:
        optimizer.update(model, x)
    twin = copy.deepcopy(optimizer)
    assert copy.copy(optimizer).target is model
    for x in batches[2:]:
        for each in optimizer, twin:
            each.update(each.target, x)
    for each in model, twin.target:
        assert parameter_bits(each) == stale_bits(comm, batches)


def test_nothing_is_left_behind(world):
    """Threads end, the interpreter's interval is what it was, gradients are let go."""
    interval, threads = sys.getswitchinterval(), threading.active_count()
    sent: list[weakref.ref] = []

    def watch(grads):
        sent.extend(weakref.ref(p.grad) for _, p in grads.namedparams() if p.grad is not None)

    for comm in create_communicator("hierarchical"), WatchedCommunicator(world, watch):
        model = TanhNet(0)
        optimizer = buffered(comm, model)
        for _ in range(3):
            optimizer.update(model, batch_of(0, 0))
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


def test_on_a_gpu_the_exchange_comes_after_the_gradients_on_a_stream_of_its_own(monkeypatch, world):
    """A double of CuPy writes down who does what in which order."""
    log = []

    def note(what):
        log.append((threading.current_thread() is threading.main_thread(), what))

    class Device(chainer.backend.CpuDevice):
        pass

    class Event:
        def __init__(self, **_):
            note("event made")

        def record(self):
            note("recorded")

    class Stream:
        def __init__(self, non_blocking):
            assert non_blocking

        def __enter__(self):
            note("stream entered")

        def __exit__(self, *_):
            note("stream left")

        def wait_event(self, event):
            assert isinstance(event, Event)
            note("stream waits for event")

        def synchronize(self):
            note("stream done")

    @contextlib.contextmanager
    def using_device(device):
        assert isinstance(device, Device)
        note("device")
        yield

    model = TanhNet(0)
    comm = WatchedCommunicator(world)
    optimizer = buffered(comm, model, plain_sgd)
    optimizer.update()  # broadcasts
    before = model.first.b.array.copy()
    model.cleargrads()
    model.first.b.grad = np.full(WIDTH, comm.rank, np.float32)
    comm.on_mean = lambda grads: note("exchange")
    with monkeypatch.context() as doubled:
        cupy = SimpleNamespace(cuda=SimpleNamespace(Event=Event, Stream=Stream))
        doubled.setattr("chainer.backends.cuda.cupy", cupy, raising=False)
        doubled.setattr("chainer.backends.cuda.GpuDevice", Device)
        doubled.setattr(chainer.backend, "get_device_from_array", lambda *_: Device())
        doubled.setattr(chainer, "using_device", using_device)
        optimizer.update()
        optimizer.finalize()
    optimizer.flush()
    np.testing.assert_allclose(model.first.b.array, before - (comm.size - 1) / 2, rtol=1e-6)
    main = [what for is_main, what in log if is_main]
    thread = [what for is_main, what in log if not is_main]
    assert main == ["device", "event made", "recorded"]
    assert thread == [
        *("device", "stream entered", "stream waits for event"),
        *("exchange", "stream done", "stream left"),
    ]
