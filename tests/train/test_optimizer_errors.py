"""A loss or a hook that fails on one rank: all ranks know, and can go on."""

from __future__ import annotations

import contextlib
import gc
import re
import weakref

import pytest

from chainermn_comm import PeerError
from tests.support.linear import Model, X, bad_batch, sgd
from tests.support.training import parameter_bits, same_everywhere

pytestmark = pytest.mark.world


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("where", ["loss", "backward"])
def test_a_failing_loss_is_an_error_on_all_ranks_and_the_batch_can_be_skipped(comm, where, lazy):
    model, last = Model(comm.rank, None if lazy else 3), comm.size - 1
    optimizer = sgd(comm, model)

    def fails_in_backward(x):
        loss = model(x)
        loss.backward = lambda **_: bad_batch()
        return loss

    for skipped in range(2):  # before and after the first broadcast
        before = optimizer.t, parameter_bits(model)
        loss = bad_batch if where == "loss" else fails_in_backward
        error = FloatingPointError if comm.rank == last else PeerError
        with pytest.raises(error, match="bad batch") as raised:
            optimizer.update(loss if comm.rank == last else model, X)
        assert comm.rank == last or f"rank {last}: FloatingPointError: bad" in str(raised.value)
        assert optimizer.t == before[0]
        assert parameter_bits(model) == before[1] or not skipped
        assert comm.allgather_obj(skipped) == [skipped] * comm.size  # still in step
        for _ in range(2):
            optimizer.update(model, X)
        assert same_everywhere(comm, model)
    lost = lazy and where == "loss"  # else all are initialised when an update first succeeds
    assert optimizer.t == 4 - lost


@pytest.mark.sizes(2, 3, 4)
def test_a_failing_loss_where_another_rank_has_its_gradients_already(comm):
    model = Model(0)
    optimizer = sgd(comm, model)
    optimizer.update(model, X)

    error = FloatingPointError if comm.rank == 0 else PeerError
    with pytest.raises(error, match="bad batch"):
        optimizer.update(*((bad_batch, X) if comm.rank == 0 else ()))
    optimizer.update(model, X)
    assert optimizer.t == 2


def test_a_batch_that_is_skipped_leaves_no_memory_behind(naive):
    """At once: it may have failed for want of memory."""
    batch = X.copy()
    gone = weakref.ref(batch)
    model = Model(0)
    optimizer = sgd(naive, model)

    def fail(x):
        raise MemoryError

    gc.disable()
    try:
        with contextlib.suppress(MemoryError):
            optimizer.update(fail, batch)
        del batch
        assert gone() is None
    finally:
        gc.enable()


def test_an_error_that_has_no_text_is_told_all_the_same(comm):
    class NoText(Exception):
        def __str__(self):
            raise ZeroDivisionError

    class AlreadyNamed(ValueError):
        pass

    def fail(error):
        raise error

    model, last = Model(0), comm.size - 1
    optimizer = sgd(comm, model)
    named = AlreadyNamed(f"rank {comm.rank}: bad")
    for error, text in (NoText(), "NoText"), (named, f"rank {last}: AlreadyNamed: bad$"):
        with pytest.raises(type(error) if comm.rank == last else PeerError) as raised:
            optimizer.update(*((fail, error) if comm.rank == last else (model, X)))
        assert comm.rank == last or re.search(text, str(raised.value))
    optimizer.update(model, X)
    assert optimizer.t == 1


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("timing", ["pre", "post"])
def test_ranks_have_the_same_parameters_again_after_a_hook_has_failed_on_one(comm, timing):
    def fail(_):
        if comm.rank == 0 and optimizer.t >= 1 and not failed:
            failed.append(True)
            raise FloatingPointError("planted")

    failed: list[bool] = []
    model = Model(0)
    optimizer = sgd(comm, model)
    optimizer.add_hook(fail, name="fail", timing=timing)
    for _ in range(4):
        with contextlib.suppress(FloatingPointError):
            optimizer.update(model, X)
    assert comm.rank or failed
    assert same_everywhere(comm, model)
