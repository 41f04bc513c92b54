"""What fails or differs on one rank: all ranks know, and can go on."""

from __future__ import annotations

import contextlib
import gc
import weakref
from functools import partial

import chainer
import pytest

from chainermn_comm import PeerError, RankMismatchError
from chainermn_train import create_multi_node_optimizer
from tests.support.training.linear import Model, X, bad_batch, sgd
from tests.support.training.trainers import same_everywhere

pytestmark = pytest.mark.world


def failing_backward(model, x):
    loss = model(x)
    loss.backward = lambda **_: bad_batch()
    return loss


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("where", ["loss", "backward"])
def test_a_failing_loss_is_an_error_on_all_ranks_and_the_batch_can_be_skipped(
    comm, where, lazy
):
    model, last = Model(comm.rank, None if lazy else 3), comm.size - 1
    optimizer = sgd(comm, model)
    failing = bad_batch if where == "loss" else partial(failing_backward, model)
    for skipped in range(2):  # before and after the first broadcast
        t = optimizer.t
        if comm.rank == last:
            with pytest.raises(FloatingPointError, match="bad batch"):
                optimizer.update(failing, X)
        else:
            with pytest.raises(
                PeerError, match=f"rank {last}: FloatingPointError: bad"
            ):
                optimizer.update(model, X)
        assert optimizer.t == t
        assert comm.allgather_obj(skipped) == [skipped] * comm.size  # still in step
        for _ in range(2):
            optimizer.update(model, X)
        assert same_everywhere(comm, model)
    # Else all are initialised when an update first succeeds.
    lost = lazy and where == "loss"
    assert optimizer.t == 4 - lost


def test_a_batch_that_is_skipped_leaves_no_memory_behind(naive):
    """At once: it may have failed for want of memory."""
    batch = X.copy()
    gone = weakref.ref(batch)
    optimizer = sgd(naive, Model(0))
    gc.disable()
    try:
        with contextlib.suppress(FloatingPointError):
            optimizer.update(bad_batch, batch)
        del batch
        assert gone() is None
    finally:
        gc.enable()


# Ranks that have made different optimizers, or different numbers of updates.

# What rank 1 alone has, and what the error says of it.
DIFFERENT = [
    ({"double_buffering": True}, "double_buffering: False on ranks? 0.*; True on"),
    ({"zero_fill": False}, "zero_fill: True on ranks? 0.*; False on"),
    ({"overlap": True}, "overlap: None on ranks? 0.*; True on"),
    ({"accumulate_steps": 2}, "accumulate_steps: 1 on ranks? 0.*; 2 on"),
    ({"lr": 0.25}, "lr of hyperparameters: 0.5 on ranks? 0.*; 0.25 on"),
    (
        {"kind": chainer.optimizers.MomentumSGD},
        r"by creation: number \d+ \(SGD\) on ranks? 0.*; number \d+ \(MomentumSGD\) on",
    ),
]


def different(comm, kind=chainer.optimizers.SGD, lr=0.5, **settings):
    optimizer = create_multi_node_optimizer(kind(lr), comm, **settings)
    return optimizer.setup(Model(0))


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(("settings", "text"), DIFFERENT)
def test_what_differs_is_named_at_the_first_update(comm, settings, text):
    own = settings if comm.rank == 1 else {}
    optimizer = different(comm, **own)
    for _ in range(2):  # nothing has been agreed on by the first
        with pytest.raises(RankMismatchError, match=f"disagree on .*{text} rank 1"):
            optimizer.update(optimizer.target, X)
    assert optimizer.t == 0
    assert comm.allreduce_obj(1) == comm.size


# Updates of a step, those of all ranks but rank 1, and its own.
UPDATES = [(3, 6, 4), (3, 2, 4), (2, 4, 5), (1, 1, 2)]


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("double_buffering", [False, True])
def test_ranks_out_of_step_at_a_flush_are_told_why(comm, updates, double_buffering):
    steps, *of_ranks = updates
    optimizer = sgd(
        comm,
        Model(0),
        accumulate_steps=steps,
        double_buffering=double_buffering,
    )

    def call():
        for _ in range(of_ranks[comm.rank == 1]):
            optimizer.update(optimizer.target, X)
        optimizer.flush()

    # Whoever makes more updates is in one of them while the others flush.
    late = int(of_ranks[1] > of_ranks[0])
    text = rf"disagree on call: .*update\(\) on ranks? {late}"
    with pytest.raises(RankMismatchError, match=text) as raised:
        call()
    assert "flush() on rank" in str(raised.value)
    assert "equally often" in str(raised.value)
    assert comm.allreduce_obj(1) == comm.size
    optimizer.finalize()
