"""Loss scales of several ranks are one, or ranks are told."""

from __future__ import annotations

import numpy as np
import pytest
from chainer.optimizers import SGD

from chainermn_comm import RankMismatchError
from tests.support.doubles.synchronizations import written_down
from tests.support.training.exchanges import KINDS, exchanging
from tests.support.training.small_models import Model, update

pytestmark = pytest.mark.world


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


def test_an_integer_is_the_same_scale_and_an_order_in_memory_no_difference():
    """Ranks needn't compare more than usual, then."""
    with written_down("naive") as (comm, calls):
        optimizer = exchanging("synchronous", comm, SGD(), Model(0))
        update(optimizer)  # else all get rank 0's
        scale = 128.0
        if comm.rank:
            scale = 128
            weights = optimizer.target.main.W
            weights.array = np.asfortranarray(weights.array)
        optimizer.set_loss_scale(scale)
        update(optimizer, 2)
        calls.clear()
        update(optimizer)
        assert len([call for call in calls if call.is_agreement]) == 1
        optimizer.finalize()
