"""What fails while gradients are in flight, or before they are, is raised on all ranks."""

from __future__ import annotations

import chainer
import numpy as np
import pytest

from chainermn_comm import PeerError, RankMismatchError
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
