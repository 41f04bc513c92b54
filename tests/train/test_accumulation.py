"""With accumulate_steps=k, k updates equal one of the large batch."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from unittest import mock

import chainer
import numpy as np
import pytest

from chainermn_comm import PeerError
from chainermn_train import create_multi_node_optimizer
from chainermn_train.optimizers import accumulation
from tests.support.training.exchanges import HIERARCHICAL, KINDS, exchanging, states
from tests.support.training.stale import TanhNet, batch_of
from tests.support.training.trainers import (
    assert_near,
    load_state,
    same_everywhere,
    state_of,
)

pytestmark = pytest.mark.world

WIDTH = 7
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-3}


net = partial(TanhNet, n_in=WIDTH, width=6)
batch = partial(batch_of, width=WIDTH)
momentum = partial(chainer.optimizers.MomentumSGD, lr=0.5)


def accumulating(comm, model, steps, make=momentum):
    return create_multi_node_optimizer(make(), comm, accumulate_steps=steps).setup(
        model
    )


def large_steps(model, size, *groups):
    """One process that steps once along the gradient of all ranks' batches of these numbers."""
    optimizer = momentum().setup(model)
    for numbers in groups:
        batches = [batch(rank, number) for rank in range(size) for number in numbers]
        optimizer.update(model, np.concatenate(batches))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_it_equals_the_large_batch_a_partial_last_group_included(comm, dtype):
    """Groups of 3, 3 and 1."""
    with chainer.using_config("dtype", np.dtype(dtype)):
        model, expected = net(comm.rank), net(0)
        optimizer = accumulating(comm, model, 3)
        for number in range(7):
            optimizer.update(model, batch(comm.rank, number))
            assert optimizer.t == (number + 1) // 3
        optimizer.flush()
        optimizer.flush()
        large_steps(expected, comm.size, (0, 1, 2), (3, 4, 5), (6,))
        assert optimizer.t == 3
        assert_near(model, expected, TOLERANCES[dtype])
        assert same_everywhere(comm, model)


@pytest.mark.sizes(2, 3, 4)
def test_a_last_group_with_more_updates_on_some_ranks_counts_each_once(
    comm, double_precision
):
    """Rank r has r + 1 updates left."""
    model, expected = net(0), net(0)
    optimizer = accumulating(comm, model, 6)
    optimizer.assume_synchronized()
    for number in range(comm.rank + 1):  # the first of a group is collective
        optimizer.update(model, batch(comm.rank, number))
    optimizer.flush()
    batches = [batch(rank, n) for rank in range(comm.size) for n in range(rank + 1)]
    momentum().setup(expected).update(expected, np.concatenate(batches))
    assert optimizer.t == 1
    assert_near(model, expected, 1e-12)


def test_sixteen_bit_gradients_are_added_in_float32(naive):
    """Their sum would be infinite, their mean is not."""
    with chainer.using_config("dtype", np.dtype("float16")):
        model = net(0)
        optimizer = accumulating(
            naive, model, 4, lambda: chainer.optimizers.SGD(lr=2.0**-10)
        )
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
    large_steps(expected, comm.size, range(3))
    assert_near(model, expected, 1e-12)


@HIERARCHICAL
@pytest.mark.parametrize("kind", KINDS)
def test_a_flush_that_fails_on_a_rank_loses_nothing(comm, kind):
    """It is repeated, and makes the steps that it would have made."""
    ends = []
    for fails in False, True:
        optimizer = exchanging(kind, comm, momentum(), net(0), steps=3)
        for number in range(5):
            optimizer.update(optimizer.target, batch(comm.rank, number))
        if fails:
            with pytest.MonkeyPatch.context() as patch:
                if comm.rank == comm.size - 1:
                    failing = mock.Mock(side_effect=MemoryError)
                    patch.setattr(accumulation.Accumulation, "assign_mean", failing)
                with pytest.raises((MemoryError, PeerError)):
                    optimizer.flush()
        optimizer.flush()
        assert optimizer.t == 2
        ends.append(states(optimizer))
        optimizer.finalize()
    assert ends[0] == ends[1]


# Saving and loading.


def test_sums_that_belong_elsewhere_are_refused(naive):
    optimizer = accumulating(naive, net(0), 4)
    name = "chainermn/group/size"
    for updates in 1, 2, 3, 4:
        optimizer.update(optimizer.target, batch(0, 0))
        state = state_of(optimizer)
        if updates == 3:
            with pytest.raises(ValueError, match="gradients of 3 updates"):
                load_state(accumulating(naive, net(0), 3), state)
        assert state[name] == naive.size
        state[name] = np.asarray(naive.size + 1)
        other = accumulating(naive, net(0), 4)
        if updates < 4:
            with pytest.raises(
                ValueError, match=f"rank {naive.rank} of {naive.size + 1} added"
            ):
                load_state(other, state)
        else:  # after a step there is nothing that belongs to a rank
            load_state(other, state)
            assert other.t == 1


def test_sums_of_a_snapshot_go_to_the_device_of_the_gradients(monkeypatch):
    class ElsewhereArray(np.ndarray):
        """A double of a GPU's array."""

    device = SimpleNamespace(send=lambda array: array.view(ElsewhereArray))
    monkeypatch.setattr(accumulation, "get_device_from_array", lambda _: device)

    param = chainer.Parameter(np.zeros(3, "f4"))
    model = SimpleNamespace(params=lambda: [param], namedparams=lambda: [("/p", param)])
    group, resumed = (accumulation.Accumulation(4) for _ in range(2))
    with mock.patch.object(type(param), "grad", np.ones(3, "f4").view(ElsewhereArray)):
        group.add(accumulation.ParameterSet(model))
        state = chainer.serializers.DictionarySerializer()
        group.serialize(state, model, 0, 1)
        on_host = {name: np.array(array) for name, array in state.target.items()}
        resumed.serialize(chainer.serializers.NpzDeserializer(on_host), model, 0, 1)
        assert type(resumed.sums.gradients[0].grad) is np.ndarray
        resumed.add(accumulation.ParameterSet(model))
    total = resumed.sums.gradients[0].grad
    assert isinstance(total, ElsewhereArray)
    assert total.tolist() == [2, 2, 2]
