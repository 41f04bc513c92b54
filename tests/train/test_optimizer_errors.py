"""What fails or differs on one rank: all ranks know, and can go on."""

from __future__ import annotations

import contextlib
import gc
import re
import weakref

import chainer
import pytest

from chainermn_comm import PeerError, RankMismatchError
from chainermn_train import create_multi_node_optimizer
from tests.support.plugins.pairwise import tiered
from tests.support.training.linear import Model, X, bad_batch, sgd
from tests.support.training.trainers import parameter_bits, same_everywhere

pytestmark = pytest.mark.world


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("where", ["loss", "backward"])
def test_a_failing_loss_is_an_error_on_all_ranks_and_the_batch_can_be_skipped(
    comm, where, lazy
):
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
        assert comm.rank == last or f"rank {last}: FloatingPointError: bad" in str(
            raised.value
        )
        assert optimizer.t == before[0]
        assert parameter_bits(model) == before[1] or not skipped
        assert comm.allgather_obj(skipped) == [skipped] * comm.size  # still in step
        for _ in range(2):
            optimizer.update(model, X)
        assert same_everywhere(comm, model)
    # Else all are initialised when an update first succeeds.
    lost = lazy and where == "loss"
    assert optimizer.t == 4 - lost


@pytest.mark.sizes(2, 3, 4)
def test_a_failing_loss_where_another_rank_has_its_gradients_already(comm):
    model = Model(0)
    optimizer = sgd(comm, model)
    optimizer.update(model, X)
    with pytest.raises(
        FloatingPointError if comm.rank == 0 else PeerError, match="bad batch"
    ):
        optimizer.update(*((bad_batch, X) if comm.rank == 0 else ()))
    optimizer.update(model, X)
    assert optimizer.t == 2


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
    for error, text in (
        (NoText(), "NoText"),
        (named, f"rank {last}: AlreadyNamed: bad$"),
    ):
        with pytest.raises(type(error) if comm.rank == last else PeerError) as raised:
            optimizer.update(*((fail, error) if comm.rank == last else (model, X)))
        assert comm.rank == last or re.search(text, str(raised.value))
    optimizer.update(model, X)
    assert optimizer.t == 1


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("timing", ["pre", "post"])
def test_ranks_have_the_same_parameters_again_after_a_hook_has_failed_on_one(
    comm, timing
):
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


# Ranks that have made different optimizers, or different numbers of updates.

# A setting, its value on all ranks but rank 1, and there.
SETTINGS = [
    ("double_buffering", False, True),
    ("zero_fill", True, False),
    *(("accumulate_steps", *values) for values in [(1, 2), (3, 2), (2, 1), (2, 5)]),
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


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("kind", "rate", "text"),
    [
        (
            "MomentumSGD",
            0.5,
            r"by creation: number \d+ \(SGD\) on ranks? 0.*; number \d+ \(MomentumSGD\) on rank 1",
        ),
        ("SGD", 0.25, "lr of hyperparameters: 0.5 on ranks? 0.*; 0.25 on rank 1"),
    ],
)
def test_optimizers_that_differ_are_named_at_the_first_update(comm, kind, rate, text):
    kind, rate = (kind, rate) if comm.rank == 1 else ("SGD", 0.5)
    optimizer = create_multi_node_optimizer(
        getattr(chainer.optimizers, kind)(rate), comm
    )
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
    optimizer = sgd(
        comm, model, accumulate_steps=steps, double_buffering=double_buffering
    )
    mine = updates[comm.rank == 1]
    more = mine == max(updates)

    def call():
        for _ in range(mine):
            optimizer.update(model, X)
        optimizer.flush()

    with pytest.raises(
        RankMismatchError, match=r"disagree on call: .* equally often"
    ) as raised:
        call()
    told = re.findall(r"(\w+)\(\) on ranks? ([\d, ]+)", str(raised.value))
    methods = {
        int(rank): method for method, ranks in told for rank in ranks.split(", ")
    }
    assert len(methods) == comm.size
    assert sorted(methods.values()).count("flush") in (1, comm.size - 1)
    assert (methods[comm.rank] == "update") == more
    assert comm.allreduce_obj(1) == comm.size
    optimizer.finalize()
