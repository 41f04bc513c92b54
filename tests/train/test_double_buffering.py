"""With double buffering an update steps along the mean gradient of the update before it."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import time

import chainer
import chainer.links as L
import numpy as np
import pytest

from chainermn_comm import create_communicator
from chainermn_train import create_multi_node_optimizer
from tests.support.stale import (
    WIDTH,
    Net,
    adam,
    arrays,
    assert_same_bits,
    batch,
    buffered,
    stale_loop,
)

pytestmark = pytest.mark.world

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


def test_the_wire_dtype_is_that_which_the_communicator_has_by_then(world):
    def batches(comm, dtypes):
        for number, dtype in enumerate(dtypes):
            comm.set_config("allreduce_grad_dtype", dtype)
            yield batch(comm.rank, number)

    ends = []
    with create_communicator("flat", world) as comm:
        for dtypes in (None, None, None, None), (None, "float16", None, "float64"):
            model, expected = Net(comm.rank), Net(0)
            optimizer = buffered(comm, model)
            for x in batches(comm, dtypes):
                optimizer.update(model, x)
            stale_loop(comm, expected, adam(expected), batches(comm, dtypes))
            assert_same_bits(model, expected)
            ends.append(arrays(model))
            optimizer.finalize()
    assert not np.array_equal(ends[0]["/first/W"], ends[1]["/first/W"])


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
