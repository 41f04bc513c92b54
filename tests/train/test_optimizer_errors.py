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
from tests.support.plugins.pairwise import tiered
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


class NoText(Exception):
    def __str__(self):
        raise ZeroDivisionError


class AlreadyNamed(ValueError):
    """Its text begins with a rank, as those of errors that came from others do."""


def test_an_error_that_has_no_text_is_told_all_the_same(comm):
    def fail(error):
        raise error

    model, last = Model(0), comm.size - 1
    optimizer = sgd(comm, model)
    for error, text in (
        (NoText(), "NoText"),
        (AlreadyNamed(f"rank {last}: bad"), f"rank {last}: AlreadyNamed: bad$"),
    ):
        if comm.rank == last:
            with pytest.raises(type(error)):
                optimizer.update(fail, error)
        else:
            with pytest.raises(PeerError, match=text):
                optimizer.update(model, X)
    optimizer.update(model, X)
    assert optimizer.t == 1


# Ranks that have made different optimizers, or different numbers of updates.

# A setting, its value on all ranks but rank 1, and there.
SETTINGS = [
    ("double_buffering", False, True),
    ("zero_fill", True, False),
    ("overlap", False, True),
    ("accumulate_steps", 1, 2),
    ("accumulate_steps", 3, 2),
]
# Updates of a step, those of all ranks but rank 1, and its own.
UPDATES = [(3, 6, 4), (3, 2, 4), (2, 4, 5), (1, 1, 2)]


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("setting", "lazy"),
    tiered(
        [(setting, number % 2) for number, setting in enumerate(SETTINGS)],
        SETTINGS,
        [0, 1],
    ),
)
def test_settings_that_differ_are_named_at_the_first_update(comm, setting, lazy):
    name, *values = setting
    model = Model(0, None if lazy else 3)
    optimizer = sgd(comm, model, **{name: values[comm.rank == 1]})
    text = f"disagree on {name}: {values[0]} on ranks? 0.*; {values[1]} on rank 1"
    for _ in range(2):  # nothing has been agreed on by the first
        with pytest.raises(RankMismatchError, match=text):
            optimizer.update(model, X)
    assert optimizer.t == 0
    assert comm.allreduce_obj(1) == comm.size
    optimizer.finalize()


BY_CREATION = (
    r"by creation: number \d+ \(SGD\) on ranks? 0.*; number \d+ \(MomentumSGD\) on rank"
)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("kind", "rate", "text"),
    [
        ("MomentumSGD", 0.5, BY_CREATION),
        ("SGD", 0.25, "lr of hyperparameters: 0.5 on ranks? 0.*; 0.25 on rank 1"),
    ],
)
def test_optimizers_that_differ_are_named_at_the_first_update(comm, kind, rate, text):
    if comm.rank != 1:
        kind, rate = "SGD", 0.5
    actual = getattr(chainer.optimizers, kind)(rate)
    optimizer = create_multi_node_optimizer(actual, comm)
    optimizer.setup(Model(0))
    with pytest.raises(RankMismatchError, match=text):
        optimizer.update(optimizer.target, X)
    assert comm.allreduce_obj(1) == comm.size


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("updates", "double_buffering"),
    tiered(
        [(updates, number % 2) for number, updates in enumerate(UPDATES)],
        UPDATES,
        [0, 1],
    ),
)
def test_ranks_out_of_step_at_a_flush_are_told_why(comm, updates, double_buffering):
    model = Model(0)
    steps, *updates = updates
    settings = {"accumulate_steps": steps, "double_buffering": double_buffering}
    optimizer = sgd(comm, model, **settings)
    mine = updates[comm.rank == 1]

    def call():
        for _ in range(mine):
            optimizer.update(model, X)
        optimizer.flush()

    # Whoever makes more updates is in one of them while the others flush.
    ranks = [1] if max(updates) == updates[1] else [0, *range(2, comm.size)]
    named = rf"update\(\) on ranks? {', '.join(map(str, ranks))}"
    with pytest.raises(
        RankMismatchError, match=rf"disagree on call: .*{named}"
    ) as raised:
        call()
    assert "flush() on rank" in str(raised.value)
    assert "equally often" in str(raised.value)
    assert comm.allreduce_obj(1) == comm.size
    optimizer.finalize()
