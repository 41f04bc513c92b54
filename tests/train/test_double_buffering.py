"""With double buffering an update steps along the mean gradient of the update before it."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import time
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import training
from chainer.optimizer_hooks import GradientClipping, WeightDecay
from chainer.training import extensions

from chainermn_comm import PeerError, RankMismatchError, create_communicator
from chainermn_comm.catalogue import make_communicator
from chainermn_comm.topology import Topology
from chainermn_train import create_multi_node_evaluator, create_multi_node_optimizer

from .conftest import make

pytestmark = pytest.mark.world

BATCH, WIDTH = 8, 300
WORLDS = {
    "naive": None,
    "flat": None,
    "hierarchical": None,
    "two_dimensional": None,
    "single_node": None,
    "plain": None,
    "hierarchical on nodes": (0, 1, 0, 1),
    "two_dimensional on nodes": (0, 0, 1, 1),
}


@pytest.fixture(scope="module", params=WORLDS)
def every(request):
    """Each communicator, some with nodes imposed."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    nodes = WORLDS[request.param]
    if nodes is None:
        comm = make(request.param, world)
    else:
        topology = Topology.of(nodes[: world.size])
        comm = make_communicator(request.param.split()[0], topology=topology)
    yield comm
    comm.finalize()


class Net(chainer.Chain):
    def __init__(self, seed, n_in: int | None = WIDTH):
        super().__init__()
        np.random.seed(seed)
        with self.init_scope():
            self.first = L.Linear(n_in, WIDTH)
            self.second = L.Linear(WIDTH, 3)
            self.scale = chainer.Parameter(np.ones((), chainer.config.dtype))
            self.unused = chainer.Parameter(np.ones(2, chainer.config.dtype))

    def __call__(self, x):
        h = F.tanh(self.first(x))
        # Gradients of many kinds: whole, 0-d, transposed, read-only.
        return F.mean(self.second(h) ** 2) * self.scale + F.sum(self.second.b)


def batch(rank, number):
    random = np.random.RandomState(1000 * rank + number)
    return random.uniform(-1, 1, (BATCH, WIDTH)).astype(chainer.config.dtype)


def arrays(model):
    return {name: param.array.copy() for name, param in sorted(model.namedparams())}


def assert_same_bits(model, expected):
    mine, others = arrays(model), arrays(expected)
    assert {name: a.tobytes() for name, a in mine.items()} == {
        name: a.tobytes() for name, a in others.items()
    }


def adam(model):
    optimizer = chainer.optimizers.Adam().setup(model)
    optimizer.add_hook(WeightDecay(1e-3))
    optimizer.add_hook(GradientClipping(0.1))
    return optimizer


def stale_loop(comm, model, optimizer, batches, scales=None):
    """What double buffering must equal: each step uses the mean gradients of the step before."""
    before = None
    for number, x in enumerate(batches):
        scale = scales[number] if scales else None
        model.cleargrads()
        model(x).backward(loss_scale=scale)
        comm.multi_node_mean_grad(model, True)
        now = {
            name: None if param.grad is None else param.grad.copy()
            for name, param in model.namedparams()
        }
        if before is not None:
            grads, before_scale = before
            for name, param in model.namedparams():
                param.grad = grads[name]
                param._loss_scale = before_scale
            optimizer.update()
        before = now, scale


def buffered(comm, model, make_optimizer=adam, **kwds):
    return create_multi_node_optimizer(make_optimizer(model), comm, True, **kwds)


# The sequence of parameters.


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_it_equals_a_loop_that_is_one_step_stale_bit_for_bit(every, dtype):
    with chainer.using_config("dtype", np.dtype(dtype)):
        model, expected = Net(every.rank), Net(0)
        optimizer = buffered(every, model)
        random = np.random.RandomState(every.rank)
        batches = [batch(every.rank, number) for number in range(6)]
        for number, x in enumerate(batches):
            time.sleep(random.uniform(0, 3e-3))
            optimizer.update(model, x)
            assert optimizer.t == number
        single = adam(expected)
        stale_loop(every, expected, single, batches)
        assert_same_bits(model, expected)
        optimizer.finalize()


def test_without_a_loss_function_it_is_the_same(comm):
    model, expected = Net(comm.rank), Net(0)
    optimizer = buffered(comm, model)
    optimizer.update()  # broadcasts
    batches = [batch(comm.rank, number) for number in range(4)]
    for x in batches:
        model.cleargrads()
        loss = model(x)
        loss.backward()
        optimizer.update()
    assert optimizer.t == 3
    stale_loop(comm, expected, adam(expected), batches)
    assert_same_bits(model, expected)


def test_the_last_gradients_are_used_by_flush(comm):
    model, expected = Net(comm.rank), Net(0)
    optimizer, synchronous = buffered(comm, model), None
    optimizer.update(model, batch(comm.rank, 0))
    optimizer.flush()
    optimizer.flush()  # nothing is left
    assert optimizer.t == 1
    synchronous = create_multi_node_optimizer(adam(expected), comm)
    synchronous.update(expected, batch(comm.rank, 0))
    assert_same_bits(model, expected)
    optimizer.update(model, batch(comm.rank, 1))  # only starts
    assert optimizer.t == 1


def test_lazily_initialised_links_start_one_update_later(comm):
    model = Net(comm.rank, None)
    optimizer = buffered(comm, model)
    for t in 0, 0, 1, 2:
        optimizer.update(model, batch(comm.rank, 0))
        assert optimizer.t == t
    mine = [array.tobytes() for array in arrays(model).values()]
    assert all(others == mine for others in comm.allgather_obj(mine))


@pytest.mark.parametrize("where", ["everywhere", "rank 0", "last rank"])
def test_gradients_in_flight_do_not_move_a_link_that_has_replaced_theirs(comm, where):
    model = Net(comm.rank)
    optimizer = buffered(comm, model, lambda model: chainer.optimizers.SGD(1.0).setup(model))
    optimizer.update(model, batch(comm.rank, 0))
    before = arrays(model)
    ranks = {"everywhere": range(comm.size), "rank 0": [0], "last rank": [comm.size - 1]}[where]
    if comm.rank in ranks:
        del model.second
        with model.init_scope():
            model.second = L.Linear(WIDTH, 3, initialW=0.5, initial_bias=0.25)
        for param in model.second.params():
            param.update_rule = optimizer.create_update_rule()
    optimizer.update(model, batch(comm.rank, 1))
    assert optimizer.t == 1
    assert not np.array_equal(model.first.W.array, before["/first/W"])  # moved, as ever
    if 0 in ranks:
        np.testing.assert_array_equal(model.second.W.array, np.full((3, WIDTH), 0.5))
    else:  # they got rank 0's, whose gradients these are
        assert not np.array_equal(model.second.W.array, before["/second/W"])
    optimizer.update(model, batch(comm.rank, 2))
    mine = [array.tobytes() for array in arrays(model).values()]
    assert all(others == mine for others in comm.allgather_obj(mine))


def test_each_gradient_is_undone_the_loss_scale_it_was_made_with(comm):
    scales = [1.0, 4096.0, 2.0, 512.0, 512.0]  # powers of two: undone without rounding
    model, expected, plain = Net(comm.rank), Net(0), Net(0)
    batches = [batch(comm.rank, number) for number in range(len(scales))]
    optimizer = buffered(comm, model)
    for scale, x in zip(scales, batches, strict=True):
        optimizer.set_loss_scale(scale)
        optimizer.update(model, x)
    stale_loop(comm, expected, adam(expected), batches, scales)
    assert_same_bits(model, expected)
    # And without hooks that see the scaled gradients it is as if there were no scale.
    model = Net(comm.rank)
    optimizer = buffered(comm, model, lambda model: chainer.optimizers.SGD(0.1).setup(model))
    for scale, x in zip(scales, batches, strict=True):
        optimizer.set_loss_scale(scale)
        optimizer.update(model, x)
    stale_loop(comm, plain, chainer.optimizers.SGD(0.1).setup(plain), batches)
    for name, array in arrays(model).items():
        np.testing.assert_allclose(array, arrays(plain)[name], rtol=1e-5, atol=1e-7)


# What belongs to whom.


def test_gradients_are_moved_not_copied(naive):
    model = Net(0)
    optimizer = buffered(naive, model)
    optimizer.update(model, batch(0, 0))
    optimizer.flush()
    for use_loss in True, False:
        loss = model(batch(0, 1)) if not use_loss else None
        seen: dict[str, int] = {}

        def addresses(seen=seen):
            for name, param in model.namedparams():
                if param.grad is not None:
                    seen[name] = param.grad.ctypes.data

        if use_loss:

            class Look:
                def __init__(self, loss):
                    self.loss = loss

                def backward(self, **kwds):
                    self.loss.backward(**kwds)
                    addresses()

            optimizer.update(lambda x: Look(model(x)), batch(0, 1))
        else:
            model.cleargrads()
            assert loss is not None
            loss.backward()
            addresses()
            optimizer.update()
        held = optimizer._buffer._gradients
        moved = {name for name in seen if held[name].grad.ctypes.data == seen[name]}
        assert {"/first/W", "/first/b", "/second/W"} <= moved
        assert "/second/b" not in moved or held["/second/b"].grad.flags.writeable
        assert all(param.grad is None or not use_loss for param in model.params())
        optimizer.flush()


def test_what_the_user_does_with_a_gradient_does_not_reach_those_in_flight(comm):
    """Views, gradients that two parameters share, and arrays that the user keeps."""
    results = []
    for spoil in False, True:
        model = Net(0)
        a, b = model.first.b, chainer.Parameter(np.zeros(WIDTH, np.float32))
        with model.init_scope():
            model.more = b
        optimizer = buffered(comm, model, lambda model: chainer.optimizers.SGD(1.0).setup(model))
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
        results.append(arrays(model))
        mean = (comm.size + 1) / 2
        np.testing.assert_allclose(model.more.array, np.full(WIDTH, -mean), rtol=1e-6)
    for name, array in results[0].items():
        np.testing.assert_array_equal(array, results[1][name])


def test_the_training_thread_may_communicate_meanwhile(every):
    model = Net(every.rank)
    optimizer = buffered(every, model)
    for number in range(20):
        optimizer.update(model, batch(every.rank, 0))
        total = every.allreduce(np.full(1000, every.rank + number))
        expected = sum(rank + number for rank in range(every.size))
        np.testing.assert_array_equal(total, np.full(1000, expected))
        assert every.allgather_obj(number) == [number] * every.size
    optimizer.finalize()


def test_two_optimizers_can_be_in_flight_at_the_same_time(comm):
    models = [Net(comm.rank), Net(comm.rank + 7)]
    optimizers = [buffered(comm, model) for model in models]
    for number in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.update(model, batch(comm.rank, number))
    for seed, model in zip((0, 7), models, strict=True):
        expected = Net(seed)
        stale_loop(comm, expected, adam(expected), [batch(comm.rank, n) for n in range(4)])
        assert_same_bits(model, expected)


def test_copies_go_their_own_ways(comm):
    model = Net(comm.rank)
    optimizer = buffered(comm, model)
    batches = [batch(comm.rank, number) for number in range(5)]
    for x in batches[:2]:
        optimizer.update(model, x)
    twin = copy.deepcopy(optimizer)
    assert copy.copy(optimizer).target is model
    for x in batches[2:]:
        for each in optimizer, twin:
            each.update(each.target, x)
    expected = Net(0)
    stale_loop(comm, expected, adam(expected), batches)
    for each in model, twin.target:
        assert_same_bits(each, expected)


def test_nothing_is_left_behind(naive):
    """Threads end, the interpreter's interval is what it was, gradients are let go."""
    interval, threads = sys.getswitchinterval(), threading.active_count()
    with create_communicator("hierarchical") as comm:
        for _ in range(3):
            model = Net(0)
            optimizer = buffered(comm, model)
            for _ in range(3):
                optimizer.update(model, batch(0, 0))
            optimizer.finalize()
            optimizer.finalize()
            assert threading.active_count() == threads
            assert sys.getswitchinterval() == interval
            optimizer.update(model, batch(0, 0))  # it can go on
            assert optimizer.t == 3
            optimizer.finalize()
            optimizer.flush()
            held = [optimizer._buffer._gradients, optimizer._buffer._task]
            assert held == [None, None]
    del model, optimizer
    gc.collect()


# Errors.


@pytest.mark.sizes(2, 3, 4)
def test_an_error_in_flight_is_raised_by_the_next_update_on_all_ranks(naive):
    model = Net(0)
    optimizer = buffered(naive, model, zero_fill=False)
    optimizer.update(model, batch(0, 0))
    optimizer.update(model, batch(0, 1))
    before = arrays(model)
    optimizer.flush()
    assert optimizer.t == 2
    model.cleargrads()
    if naive.rank == 0:
        model.first.b.grad = np.ones(WIDTH, np.float32)
    optimizer.update()
    with pytest.raises(RankMismatchError, match="/first/b"):
        optimizer.update(model, batch(0, 2))
    assert optimizer.t == 2
    assert before.keys() == arrays(model).keys()
    for t in 2, 3:  # it starts anew
        optimizer.update(model, batch(0, 3))
        assert optimizer.t == t


def test_an_error_in_flight_is_raised_by_flush_and_by_serialize(naive):
    def fail(*_):
        raise RankMismatchError("planted")

    model = Net(0)
    optimizer = buffered(naive, model)
    optimizer.update(model, batch(0, 0))
    optimizer._buffer.wait()
    optimizer._buffer._own.multi_node_mean_grad = fail
    optimizer.update(model, batch(0, 1))
    with pytest.raises(RankMismatchError, match="planted"):
        chainer.serializers.DictionarySerializer().save(optimizer)
    with pytest.raises(RankMismatchError, match="planted"):
        optimizer.flush()
    optimizer.flush()
    assert optimizer.t == 1


def test_a_failing_loss_keeps_what_is_in_flight(comm):
    model, expected = Net(comm.rank), Net(0)
    optimizer = buffered(comm, model)
    batches = [batch(comm.rank, number) for number in range(4)]

    def fail(x):
        raise FloatingPointError("bad batch")

    for number, x in enumerate(batches):
        optimizer.update(model, x)
        if number == 1:
            error = FloatingPointError if comm.rank == 0 else PeerError
            with pytest.raises(error, match="bad batch"):
                optimizer.update(fail if comm.rank == 0 else model, x)
    stale_loop(comm, expected, adam(expected), batches)
    assert_same_bits(model, expected)


@pytest.mark.sizes(2, 3, 4)
def test_an_interrupt_in_a_loss_is_told_to_all(comm):
    model = Net(0)
    optimizer = buffered(comm, model)
    optimizer.update(model, batch(0, 0))

    def interrupt(x):
        raise KeyboardInterrupt

    error = KeyboardInterrupt if comm.rank == 0 else PeerError
    with pytest.raises(error):
        optimizer.update(interrupt if comm.rank == 0 else model, batch(0, 0))
    optimizer.update(model, batch(0, 0))
    assert optimizer.t == 1


# Saving and loading; in a trainer.


def trainer_of(comm, model, optimizer, out, updates=8):
    examples = np.concatenate([batch(comm.rank, number) for number in range(3)])
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(examples), BATCH, shuffle=False
    )
    updater = training.StandardUpdater(iterator, optimizer)
    return training.Trainer(updater, (updates, "iteration"), out=str(out))


def test_in_a_trainer_with_an_evaluator(every, tmp_path):
    model, expected = Net(every.rank), Net(0)
    optimizer = buffered(every, model)
    trainer = trainer_of(every, model, optimizer, tmp_path)
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(batch(every.rank, 0)), BATCH, repeat=False, shuffle=False
    )

    class Report(chainer.Chain):
        def __call__(self, x):
            chainer.report({"loss": model(x)}, self)

    evaluator = create_multi_node_evaluator(extensions.Evaluator(iterator, Report()), every)
    trainer.extend(evaluator, trigger=(1, "iteration"))
    trainer.run()
    assert optimizer.t == 7
    (mean,) = [value for key, value in trainer.observation.items() if key.endswith("loss")]
    assert every.allgather_obj(float(mean)) == [float(mean)] * every.size
    batches = [batch(every.rank, number % 3) for number in range(8)]
    stale_loop(every, expected, adam(expected), batches)
    assert_same_bits(model, expected)
    optimizer.finalize()


def test_resumed_training_gives_the_bits_of_uninterrupted_training(comm, tmp_path):
    whole = Net(comm.rank)
    trainer = trainer_of(comm, whole, buffered(comm, whole), tmp_path)
    name = f"snapshot_{comm.rank}_{{.updater.iteration}}"
    trainer.extend(extensions.snapshot(filename=name), trigger=(1, "iteration"))
    trainer.run()
    for iteration in 1, 4:
        resumed = Net(comm.rank + 10)
        optimizer = buffered(comm, resumed)
        trainer = trainer_of(comm, resumed, optimizer, tmp_path)
        chainer.serializers.load_npz(tmp_path / f"snapshot_{comm.rank}_{iteration}", trainer)
        assert optimizer.t == iteration - 1
        if iteration == 4:
            optimizer.assume_synchronized()
        trainer.run()
        assert_same_bits(resumed, whole)


def saved(optimizer) -> dict[str, Any]:
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(optimizer)
    return serializer.target


def load(optimizer, target: dict[str, Any]) -> None:
    chainer.serializers.NpzDeserializer(target).load(optimizer)


def test_snapshots_of_other_kinds_are_loaded_or_refused(naive):
    model = Net(0)
    optimizer = buffered(naive, model)
    for number in range(3):
        optimizer.update(model, batch(0, number))
    snapshot = saved(optimizer)
    assert all(np.asarray(value).dtype != object for value in snapshot.values())  # no pickles
    plain = adam(Net(0))
    load(plain, snapshot)
    assert plain.t == 2
    load(optimizer, saved(plain))  # Chainer's own: nothing is in flight
    optimizer.update(model, batch(0, 3))
    assert optimizer.t == 2
    synchronous = create_multi_node_optimizer(adam(Net(0)), naive)
    with pytest.raises(ValueError, match="double_buffering=True"):
        load(synchronous, snapshot)
    load(optimizer, saved(synchronous))
    optimizer.update(model, batch(0, 3))
    optimizer.flush()


def test_parameters_that_all_ranks_restored_are_not_broadcast_again(comm, monkeypatch):
    model = Net(0)
    optimizer = create_multi_node_optimizer(adam(model), comm)
    optimizer.assume_synchronized()
    model.cleargrads()
    model(batch(0, 0)).backward()

    def refuse(_):
        raise AssertionError("broadcast")

    monkeypatch.setattr(comm, "bcast_data", refuse)
    optimizer.update()
    assert optimizer.t == 1
