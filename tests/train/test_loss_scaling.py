"""Mixed precision on several ranks: loss scales, overflow, float32 parameters."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from chainer import using_config
from chainer.optimizers import SGD, Adam

from chainermn_comm import RankMismatchError
from chainermn_train import create_multi_node_optimizer
from tests.support.doubles.synchronizations import written_down
from tests.support.training.exchanges import KINDS, exchanging
from tests.support.training.small_models import Model, TanhNet, batch_of, update
from tests.support.training.trainers import load_state, parameter_bits, state_of

pytestmark = [
    pytest.mark.world,
    pytest.mark.filterwarnings("ignore:Non finite number found in param.grad"),
]

half_net = partial(TanhNet, n_in=8, width=16)
half_batch = partial(batch_of, width=8)


def mixed_precision(comm, seed):
    """With float32 parameters and a scale that adapts; Chainer's own without a communicator."""
    optimizer = Adam(eps=1e-4)
    if comm is not None:
        optimizer = create_multi_node_optimizer(optimizer, comm)
    optimizer.use_fp32_update()
    optimizer.setup(half_net(seed))
    optimizer.loss_scaling(interval=2)
    return optimizer


def overflow(model, x):
    return model(x) * np.float16(60000) * np.float16(60000)


def test_chainers_own_update_is_followed_bit_by_bit(naive):
    """After an overflow the scale grows slowly, though training was interrupted meanwhile.

    All ranks have one rank's batch, so that the mean is the gradient of one process.
    """
    found = []
    with (
        using_config("dtype", np.dtype(np.float16)),
        np.errstate(all="ignore"),
    ):
        for comm in naive, None:
            optimizer = mixed_precision(comm, 0)
            for number in range(10):
                loss = optimizer.target
                if number == 3:
                    loss = partial(overflow, loss)
                if number == 5 and comm is not None:
                    resumed = mixed_precision(comm, 1)
                    load_state(resumed.target, state_of(optimizer.target))
                    load_state(resumed, state_of(optimizer))
                    optimizer = resumed
                    loss = optimizer.target
                optimizer.update(loss, half_batch(number))
            bits = parameter_bits(optimizer.target)
            found.append((bits, optimizer._loss_scale, optimizer.t))
    assert found[0] == found[1]
    assert found[0][1] > 1


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_scale_differently_are_told(comm, kind):
    optimizer = exchanging(kind, comm, SGD(), Model(0))
    scale = 4.0
    if comm.rank:
        scale = 8.0
    optimizer.set_loss_scale(scale)
    words = r"loss_scale of the loss scale .*: 4 on rank 0; 8 on rank"
    with pytest.raises(RankMismatchError, match=words):
        update(optimizer)
    optimizer.set_loss_scale(8.0)
    update(optimizer, 2)
    last = comm.size - 1
    if comm.rank == last:
        optimizer.loss_scaling()
    words = f"loss_scale of .*: 8 on .*; 1 on rank {last}"
    with pytest.raises(RankMismatchError, match=words):
        update(optimizer)


def test_an_integer_is_the_same_scale():
    """Ranks needn't compare more than usual, then."""
    with written_down("naive") as (comm, calls):
        optimizer = exchanging("synchronous", comm, SGD(), Model(0))
        update(optimizer)  # else all get rank 0's
        scale = 128.0
        if comm.rank:
            scale = 128
        optimizer.set_loss_scale(scale)
        update(optimizer, 2)
        calls.clear()
        update(optimizer)
        assert len([call for call in calls if call.is_agreement]) == 1
        optimizer.finalize()
