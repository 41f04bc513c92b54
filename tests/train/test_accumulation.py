"""With accumulate_steps=k, k updates equal one of the large batch."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import chainer
import chainer.links as L
import numpy as np
import pytest

from chainermn_train import accumulation, create_multi_node_optimizer
from tests.support.pairwise import tiered
from tests.support.stale import BATCH, TanhNet, batch_of
from tests.support.training import (
    assert_near,
    load_state,
    same_everywhere,
    state_of,
    trainer_over,
)

pytestmark = pytest.mark.world

WIDTH = 7
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-3}
GROUPS = [(1, 2), (2, 4), (4, 6)]  # updates of a step, and in all


def net(seed, n_in: int | None = WIDTH):
    return TanhNet(seed, n_in, 6)


def batch(*seed):
    return batch_of(*seed, width=WIDTH)


def momentum():
    return chainer.optimizers.MomentumSGD(lr=0.5)


def accumulating(comm, model, steps, make=momentum):
    return create_multi_node_optimizer(make(), comm, accumulate_steps=steps).setup(model)


def large_steps(model, groups):
    """One process that steps once along the gradient of each group's examples."""
    optimizer = momentum().setup(model)
    for group in groups:
        optimizer.update(model, np.concatenate(group))


@pytest.fixture
def double_precision():
    with chainer.using_config("dtype", np.dtype("float64")):
        yield


@pytest.mark.parametrize(
    ("groups", "dtype"),
    tiered(
        [((3, 7), dtype) for dtype in TOLERANCES] + [(each, "float64") for each in GROUPS],
        GROUPS,
        TOLERANCES,
    ),
)
def test_it_equals_the_large_batch_a_partial_last_group_included(comm, monkeypatch, groups, dtype):
    steps, updates = groups
    exchanged, exchange = [], comm.multi_node_mean_grad

    def count_and_exchange(*args):
        exchanged.append(args)
        exchange(*args)

    monkeypatch.setattr(comm, "multi_node_mean_grad", count_and_exchange)
    with chainer.using_config("dtype", np.dtype(dtype)):
        model, expected = net(comm.rank), net(0)
        optimizer = accumulating(comm, model, steps)
        for number in range(updates):
            optimizer.update(model, batch(comm.rank, number))
            assert optimizer.t == len(exchanged) == (number + 1) // steps
        optimizer.flush()
        optimizer.flush()
        batches = [
            [batch(rank, n) for rank in range(comm.size) for n in range(updates)[start:][:steps]]
            for start in range(0, updates, steps)
        ]
        large_steps(expected, batches)
        assert optimizer.t == len(exchanged) == len(batches)
        assert_near(model, expected, TOLERANCES[dtype])
        assert same_everywhere(comm, model)


@pytest.mark.sizes(2, 3, 4)
def test_a_last_group_with_more_updates_on_some_ranks_counts_each_once(comm, double_precision):
    """Rank r has r updates left."""
    model, expected = net(0), net(0)
    optimizer = accumulating(comm, model, 6)
    optimizer.assume_synchronized()
    for number in range(comm.rank + 1):  # the first of a group is collective
        optimizer.update(model, batch(comm.rank, number))
    optimizer.flush()
    large_steps(expected, [[batch(rank, n) for rank in range(comm.size) for n in range(rank + 1)]])
    assert optimizer.t == 1
    assert_near(model, expected, 1e-12)


def test_sixteen_bit_gradients_are_added_in_float32(naive):
    """Their sum would be infinite, their mean is not."""
    with chainer.using_config("dtype", np.dtype("float16")):
        model = net(0)
        optimizer = accumulating(naive, model, 4, lambda: chainer.optimizers.SGD(lr=2.0**-10))
        optimizer.assume_synchronized()
        model.first.b.array[...] = 0
        for _ in range(4):
            model.cleargrads()
            model.first.b.grad = np.full(6, 40000, np.float16)
            optimizer.update()
        assert optimizer.t == 1
        np.testing.assert_array_equal(
            model.first.b.array, -np.full(6, 40000, np.float16) * np.float16(2.0**-10)
        )


def test_the_loss_scale_may_change_in_the_middle_of_a_group(comm, double_precision):
    model, expected = net(0), net(0)
    optimizer = accumulating(comm, model, 3)
    for number, scale in enumerate((8.0, 512.0, 0.25)):
        optimizer.set_loss_scale(scale)
        optimizer.update(model, batch(comm.rank, number))
    large_steps(expected, [[batch(r, n) for r in range(comm.size) for n in range(3)]])
    assert_near(model, expected, 1e-12)


def test_lazily_initialised_links_lose_one_update(comm):
    model = net(comm.rank, None)
    optimizer = accumulating(comm, model, 3)
    for number in range(4):
        assert optimizer.t == 0
        optimizer.update(model, batch(comm.rank, number))
    assert optimizer.t == 1
    assert same_everywhere(comm, model)


@pytest.mark.parametrize("steps", [2, 3])
def test_a_link_that_is_added_in_the_middle_of_a_group_is_broadcast(comm, steps):
    model = net(comm.rank)
    optimizer = accumulating(comm, model, steps)
    optimizer.update(model, batch(comm.rank, 0))
    np.random.seed(comm.rank)
    with model.init_scope():
        model.more = L.Linear(2, 2)
    for param in model.more.params():
        param.update_rule = optimizer.create_update_rule()
    for number in range(1, steps):
        optimizer.update(model, batch(comm.rank, number))
    assert optimizer.t == 1
    assert same_everywhere(comm, model)


def test_in_a_trainer_with_a_flush_at_the_end_of_each_epoch(comm, tmp_path, double_precision):
    """An epoch has 5 batches: groups of 2, 2 and 1."""
    model, expected = net(comm.rank), net(0)
    optimizer = accumulating(comm, model, 2)
    examples = np.concatenate([batch(comm.rank, number) for number in range(5)])
    trainer = trainer_over(examples, BATCH, optimizer, 10, tmp_path)
    trainer.extend(lambda _: optimizer.flush(), name="flush", trigger=(1, "epoch"))
    trainer.run()
    groups = [
        [batch(rank, n) for rank in range(comm.size) for n in numbers]
        for numbers in ((0, 1), (2, 3), (4,)) * 2
    ]
    large_steps(expected, groups)
    assert optimizer.t == 6
    assert_near(model, expected, 1e-12)


def test_copies_go_their_own_ways(comm):
    optimizer = accumulating(comm, net(0), 2)
    optimizer.update(optimizer.target, batch(comm.rank, 0))
    twin = copy.deepcopy(optimizer)
    for each in optimizer, twin:
        each.update(each.target, batch(comm.rank, 1))
        assert each.t == 1
    assert_near(optimizer.target, twin.target, 0)


# Saving and loading.


def test_a_group_that_is_too_long_for_the_optimizer_is_refused(naive):
    optimizer = accumulating(naive, net(0), 4)
    for _ in range(3):
        optimizer.update(optimizer.target, batch(0, 0))
    with pytest.raises(ValueError, match="gradients of 3 updates"):
        load_state(accumulating(naive, net(0), 3), state_of(optimizer))


def test_sums_of_another_rank_are_refused(naive):
    optimizer = accumulating(naive, net(0), 3)
    for updates in 1, 2, 3:
        optimizer.update(optimizer.target, batch(0, 0))
        state = state_of(optimizer)
        name = "chainermn/group/size"
        assert state[name] == naive.size
        state[name] = np.asarray(naive.size + 1)
        other = accumulating(naive, net(0), 3)
        if updates < 3:
            with pytest.raises(ValueError, match=f"rank {naive.rank} of {naive.size + 1} added"):
                load_state(other, state)
        else:  # after a step there is nothing that belongs to a rank
            load_state(other, state)
            assert other.t == 1


class ElsewhereArray(np.ndarray):
    """A double of a GPU's array: it doesn't mix with NumPy's."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **kwds):
        if any(type(each) is np.ndarray for each in (*inputs, *out)):
            raise TypeError("arrays on two devices")
        arrays = (each.view(np.ndarray) for each in inputs)
        if out:
            kwds["out"] = tuple(each.view(np.ndarray) for each in out)
        result = getattr(ufunc, method)(*arrays, **kwds)
        return out[0] if out else result.view(ElsewhereArray)


def test_sums_of_a_snapshot_go_to_the_device_of_the_gradients(monkeypatch):
    device = SimpleNamespace(send=lambda array: array.view(ElsewhereArray))
    monkeypatch.setattr(chainer.backend, "get_device_from_array", lambda _: device)

    def gradients():
        held = accumulation.Held(None, np.ones(3, "f4").view(ElsewhereArray), None)
        return accumulation.HeldGradients({"/p": held})

    group, resumed = accumulation.Accumulation(4), accumulation.Accumulation(4)
    group.add(gradients())
    state = chainer.serializers.DictionarySerializer()
    group.serialize(state, 0, 1)
    on_host = {name: np.array(array) for name, array in state.target.items()}
    resumed.serialize(chainer.serializers.NpzDeserializer(on_host), 0, 1)
    assert type(resumed._sums["/p"].grad) is np.ndarray
    resumed.add(gradients())
    total = resumed._sums["/p"].grad
    assert isinstance(total, ElsewhereArray)
    assert total.tolist() == [2, 2, 2]
