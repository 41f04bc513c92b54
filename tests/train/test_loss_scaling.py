"""Mixed precision on several ranks: loss scales, overflow, float32 parameters."""

from __future__ import annotations

from functools import partial

import chainer
import chainer.links as L
import numpy as np
import pytest

from chainermn_comm import RankMismatchError
from chainermn_train import create_multi_node_optimizer
from tests.support.training.exchanges import KINDS, exchanging
from tests.support.training.stale import TanhNet, batch_of
from tests.support.training.trainers import (
    clear_momenta,
    load_state,
    parameter_bits,
    same_everywhere,
    state_of,
)

pytestmark = [
    pytest.mark.world,
    pytest.mark.filterwarnings("ignore:Non finite number found in param.grad"),
]

each_kind = pytest.mark.parametrize("kind", KINDS)
half_net = partial(TanhNet, n_in=8, width=16)
half_batch = partial(batch_of, width=8)


@pytest.fixture
def mixed():
    with chainer.using_config("dtype", chainer.mixed16):
        yield


def scaled(optimizer, model, interval=3):
    """Set up so that parameters are kept in float32, with a dynamic loss scale."""
    optimizer.use_fp32_update()
    optimizer.setup(model)
    optimizer.loss_scaling(interval=interval)
    return optimizer


def mixed_precision(comm, model, kind="synchronous", steps=1):
    actual = chainer.optimizers.MomentumSGD(lr=0.01)
    return scaled(exchanging(kind, comm, actual, model, steps), model)


def overflow(model, x):
    return model(x) * np.float16(60000) * np.float16(60000)


def assert_same_everywhere(comm, optimizer):
    assert same_everywhere(comm, optimizer.target)
    mine = optimizer._loss_scale, optimizer.t
    assert comm.allgather_obj(mine) == [mine] * comm.size


@pytest.mark.parametrize(
    ("kind", "steps"), [*((kind, 1) for kind in KINDS), ("synchronous", 2)]
)
@pytest.mark.parametrize("where", [0, -1])
def test_overflow_on_one_rank_makes_all_skip_the_step(comm, mixed, kind, steps, where):
    model = half_net(comm.rank)
    optimizer = mixed_precision(comm, model, kind, steps)
    skipped = 0
    for number in range(16):
        loss = model
        if number in (6, 9) and comm.rank == where % comm.size:
            loss = partial(overflow, model)
        before, scale, t = parameter_bits(model), optimizer._loss_scale, optimizer.t
        with np.errstate(all="ignore"):
            optimizer.update(loss, half_batch(comm.rank, number))
        if optimizer.t > t:
            is_skipped = optimizer._loss_scale == scale / 2
            skipped += is_skipped
            assert is_skipped or optimizer._loss_scale > scale
            assert (parameter_bits(model) == before) == is_skipped
        assert_same_everywhere(comm, optimizer)
    assert skipped == 2


def test_a_scale_that_has_once_been_too_large_grows_slowly_after_a_snapshot_too(
    comm, mixed
):
    def updated(optimizer):
        optimizer.assume_synchronized()
        optimizer.update(optimizer.target, half_batch(comm.rank))
        return optimizer._loss_scale

    model = half_net(0)
    optimizer = mixed_precision(comm, model)
    optimizer.assume_synchronized()
    with np.errstate(all="ignore"):
        optimizer.update(partial(overflow, model), half_batch(comm.rank))
    resumed = mixed_precision(comm, half_net(1))
    load_state(resumed, state_of(optimizer))
    before = optimizer._loss_scale
    assert before < updated(resumed) == updated(optimizer) < 2 * before


def test_chainers_own_update_is_followed_bit_by_bit(naive):
    """One rank's batch on all ranks: the mean is the gradient of one process."""
    found = []
    with chainer.using_config("dtype", np.dtype(np.float16)):
        for is_multi_node in True, False:
            model = half_net(0)
            optimizer = chainer.optimizers.Adam(eps=1e-4)
            if is_multi_node:
                optimizer = create_multi_node_optimizer(optimizer, naive)
            scaled(optimizer, model, interval=2)
            for number in range(6):
                optimizer.update(model, half_batch(number))
            found.append((parameter_bits(model), optimizer._loss_scale, optimizer.t))
    assert found[0] == found[1]
    assert found[0][1] > 1


@pytest.mark.sizes(2, 3, 4)
@each_kind
def test_ranks_that_scale_differently_are_told(comm, mixed, kind):
    model = half_net(0)
    optimizer = exchanging(kind, comm, chainer.optimizers.SGD(), model)
    optimizer.set_loss_scale(8.0 if comm.rank else 4.0)
    words = r"loss_scale of the loss scale .*: 4 on rank 0; 8 on rank"
    with pytest.raises(RankMismatchError, match=words):
        optimizer.update(model, half_batch(0))
    optimizer.set_loss_scale(8.0)
    for number in range(2):
        optimizer.update(model, half_batch(number))
    last = comm.size - 1
    if comm.rank == last:
        optimizer.loss_scaling()
    words = f"loss_scale of .*: 8 on .*; 1 on rank {last}"
    with pytest.raises(RankMismatchError, match=words):
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
