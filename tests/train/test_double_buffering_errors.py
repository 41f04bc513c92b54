"""What fails while gradients are in flight, or before they are, is raised on all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm import PeerError, RankMismatchError
from tests.support.stale import WIDTH, TanhNet, batch_of, buffered
from tests.support.third_party import WatchedCommunicator
from tests.support.training import parameter_bits, state_of

pytestmark = pytest.mark.world


@pytest.mark.sizes(2, 3, 4)
def test_an_error_in_flight_is_raised_by_the_next_update_on_all_ranks(naive):
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
    optimizer.update()
    with pytest.raises(RankMismatchError, match="/first/b"):
        optimizer.update(model, batch_of(0, 2))
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


@pytest.mark.sizes(2, 3, 4)
def test_an_interrupt_in_a_loss_is_told_to_all(comm):
    model = TanhNet(0)
    optimizer = buffered(comm, model)
    optimizer.update(model, batch_of(0, 0))

    def interrupt(x):
        raise KeyboardInterrupt

    error = KeyboardInterrupt if comm.rank == 0 else PeerError
    with pytest.raises(error):
        optimizer.update(interrupt if comm.rank == 0 else model, batch_of(0, 0))
    optimizer.update(model, batch_of(0, 0))
    assert optimizer.t == 1
