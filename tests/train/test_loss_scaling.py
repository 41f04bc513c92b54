"""Mixed precision on several ranks: loss scales, overflow, float32 parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import training

from chainermn_comm import RankMismatchError
from chainermn_train import create_multi_node_optimizer
from tests.support.training.linear import Model, X, sgd
from tests.support.training.stale import TanhNet, batch_of
from tests.support.training.trainers import (
    clear_momenta,
    float32_parameters,
    load_state,
    parameter_bits,
    same_everywhere,
    state_of,
)

pytestmark = [
    pytest.mark.world,
    pytest.mark.filterwarnings("ignore:Non finite number found in param.grad"),
]

KINDS: dict[str, Any] = {
    "synchronous": {},
    "double buffering": {"double_buffering": True},
    "accumulating": {"accumulate_steps": 2},
}


half_net = partial(TanhNet, n_in=8, width=16)
half_batch = partial(batch_of, width=8)


@pytest.fixture
def mixed():
    with chainer.using_config("dtype", chainer.mixed16):
        yield


def mixed_precision(comm, model, **kwds):
    actual = chainer.optimizers.MomentumSGD(lr=0.01)
    optimizer = create_multi_node_optimizer(actual, comm, **kwds)
    optimizer.use_fp32_update()
    optimizer.setup(model)
    optimizer.loss_scaling(interval=3)
    return optimizer


def assert_same_everywhere(comm, optimizer):
    found = float32_parameters(optimizer.target).values()
    assert all(array.dtype == np.float32 for array in found)
    assert same_everywhere(comm, optimizer.target)
    mine = optimizer._loss_scale, optimizer.t
    assert comm.allgather_obj(mine) == [mine] * comm.size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", [0, -1])
def test_overflow_on_one_rank_makes_all_skip_the_step(comm, mixed, kind, where):
    def overflow(x):
        return model(x) * np.float16(60000) * np.float16(60000)

    model = half_net(comm.rank)
    optimizer = mixed_precision(comm, model, **KINDS[kind])
    bad = where % comm.size
    skipped = 0
    for number in range(16):
        spoilt = number in (6, 9) and comm.rank == bad
        before, scale, t = parameter_bits(model), optimizer._loss_scale, optimizer.t
        with np.errstate(all="ignore"):
            optimizer.update(
                overflow if spoilt else model, half_batch(comm.rank, number)
            )
        if optimizer.t > t and optimizer._loss_scale < scale:
            skipped += 1
            assert optimizer._loss_scale == scale / 2
            assert parameter_bits(model) == before
        elif optimizer.t > t:
            assert optimizer._loss_scale > scale
            assert parameter_bits(model) != before
        assert_same_everywhere(comm, optimizer)
    assert skipped == 2
    assert all(np.isfinite(param.array).all() for param in model.params())


def test_a_scale_that_has_once_been_too_large_grows_slowly_after_a_snapshot_too(
    comm, mixed
):
    def overflow(x):
        return model(x) * np.float16(60000) * np.float16(60000)

    def updated(optimizer):
        optimizer.assume_synchronized()
        optimizer.update(optimizer.target, half_batch(comm.rank))
        return optimizer._loss_scale

    model = half_net(0)
    optimizer = mixed_precision(comm, model)
    optimizer.assume_synchronized()
    with np.errstate(all="ignore"):
        optimizer.update(overflow, half_batch(comm.rank))
    resumed = mixed_precision(comm, half_net(1))
    load_state(resumed, state_of(optimizer))
    before = optimizer._loss_scale
    assert before < updated(resumed) == updated(optimizer) < 2 * before


@pytest.mark.parametrize("kind", KINDS)
def test_small_steps_are_kept_in_float32(comm, mixed, kind):
    """They would be lost in float16."""
    model = half_net(comm.rank)
    optimizer = mixed_precision(comm, model, **KINDS[kind])
    optimizer.lr = 1e-5
    optimizer.update(model, half_batch(comm.rank, 0))
    optimizer.flush()
    assert model.first.W.dtype == np.float16
    start = float32_parameters(model)["/first/W"].copy()
    for number in range(6):
        optimizer.update(model, half_batch(comm.rank, number))
    optimizer.flush()
    assert not np.array_equal(float32_parameters(model)["/first/W"], start)
    assert_same_everywhere(comm, optimizer)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_scale_differently_are_told(comm, mixed, kind):
    model = half_net(0)
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(), comm, **KINDS[kind]
    )
    optimizer.setup(model)
    optimizer.set_loss_scale(8.0 if comm.rank else 4.0)
    with pytest.raises(
        RankMismatchError,
        match=r"loss_scale of the loss scale .*: 4 on rank 0; 8 on rank",
    ):
        optimizer.update(model, half_batch(0))
    optimizer.set_loss_scale(8.0)
    for number in range(2):
        optimizer.update(model, half_batch(number))
    if comm.rank == comm.size - 1:
        optimizer.loss_scaling()

    with pytest.raises(
        RankMismatchError, match=f"loss_scale of .*: 8 on .*; 1 on rank {comm.size - 1}"
    ):
        optimizer.update(model, half_batch(0))


@pytest.mark.sizes(2, 3, 4)
def test_float32_parameters_are_broadcast_with_the_others(comm, mixed):
    """A rank that has new ones starts from rank 0's, not from what float16 keeps of them."""
    model = half_net(0)
    optimizer = mixed_precision(comm, model)
    for number in range(3):
        optimizer.update(model, half_batch(comm.rank, number))
    if comm.rank == comm.size - 1:
        del model.second
        model.add_link("second", L.Linear(16, 3))
        for param in model.second.params():
            param.update_rule = optimizer.create_update_rule()
            param.update_rule.use_fp32_update()
    clear_momenta(model.second, 3)  # they are not broadcast
    optimizer.update(model, half_batch(comm.rank, 4))
    assert_same_everywhere(comm, optimizer)


# A scale that stays as it is.


def test_loss_scale_of_the_updater_reaches_the_actual_optimizer(comm):
    model, expected = Model(0), Model(0)
    optimizer = sgd(comm, model)
    seen = []
    optimizer.add_hook(lambda _: seen.append(model.main.W.grad.copy()), name="see")
    iterator = chainer.iterators.SerialIterator(X, 4, shuffle=False)
    training.StandardUpdater(iterator, optimizer, loss_scale=64.0).update()
    chainer.optimizers.SGD(lr=0.5).setup(expected).update(expected, X)
    assert optimizer.actual_optimizer._loss_scale == 64.0
    np.testing.assert_allclose(seen[0], 64 * expected.main.W.grad, rtol=1e-5)
    np.testing.assert_allclose(model.main.W.array, expected.main.W.array, rtol=1e-5)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("steps", [1, 3])
def test_loss_scale_is_undone_where_a_rank_has_no_gradient(comm, steps):
    """Rank 0 doesn't use `more`; the others' mean arrives there scaled."""
    model = Model(0)
    model.add_link("more", L.Linear(2, 2))
    optimizer = sgd(comm, model, accumulate_steps=steps)
    optimizer.set_loss_scale(64.0)
    mine = model.main if comm.rank == 0 else model.more
    before = model.more.W.array.copy()
    for _ in range(2 * steps):
        optimizer.update(lambda: F.sum(mine.b) + F.sum(mine.W))
        assert same_everywhere(comm, model)
    mean = (comm.size - 1) / comm.size
    np.testing.assert_allclose(
        model.more.W.array, before - 2 * 0.5 * mean, rtol=0, atol=1e-5
    )
