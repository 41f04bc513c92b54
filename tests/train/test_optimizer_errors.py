"""What fails or differs on one rank: all ranks know, and can go on."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from operator import methodcaller

import chainer.links as L
import pytest
from chainer.optimizers import SGD, MomentumSGD

from chainermn_comm import RankMismatchError
from chainermn_train import create_multi_node_optimizer
from tests.support.training.small_models import Model, X, bad_batch, sgd, update
from tests.support.training.trainers import same_everywhere

pytestmark = pytest.mark.world


def test_a_batch_that_is_skipped_leaves_no_memory_behind(naive):
    """At once: it may have failed for want of memory."""
    batch = X.copy()
    gone = weakref.ref(batch)
    optimizer = sgd(naive, Model(0))
    gc.disable()
    try:
        with suppress(FloatingPointError):
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
        {"kind": MomentumSGD},
        r"by creation: number \d+ \(SGD\) on ranks? 0.*; number \d+ \(MomentumSGD\) on",
    ),
]


def different(comm, kind=SGD, lr=0.5, **settings):
    optimizer = create_multi_node_optimizer(kind(lr), comm, **settings)
    return optimizer.setup(Model(0))


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(("settings", "text"), DIFFERENT)
def test_what_differs_is_named_at_the_first_update(comm, settings, text):
    own = {}
    if comm.rank == 1:
        own = settings
    optimizer = different(comm, **own)
    for _ in range(2):  # nothing has been agreed on by the first
        with pytest.raises(RankMismatchError, match=f"disagree on .*{text} rank 1"):
            update(optimizer)
    assert optimizer.t == 0
    assert comm.allreduce_obj(1) == comm.size


def test_a_missing_gradient_is_told_of_zero_fill(naive):
    optimizer = sgd(naive, Model(0), zero_fill=False)
    update(optimizer)
    model = optimizer.target
    model.cleargrads()
    if naive.rank != 1:
        model(X).backward()
    text = "no gradient on rank 1.* use zero_fill=True"
    with pytest.raises(RankMismatchError, match=text) as raised:
        optimizer.update()
    assert "count iterations" not in str(raised.value)
    update(optimizer)
    assert optimizer.t == 2


# How many outputs the new link of rank 1 has, whether rank 1 sets it up, and the words.
REPLACED = [
    (2, False, r"setup\(\) hasn't seen.*: none on .*; /main/W on rank 1"),
    (3, True, r"/main/W float32 \(3, 3\) on rank 1.* add and replace links alike"),
]


@pytest.mark.parametrize(("n_out", "is_set_up", "text"), REPLACED)
def test_a_link_replaced_on_one_rank_is_named(naive, n_out, is_set_up, text):
    optimizer = sgd(naive, Model(0))
    update(optimizer, 2)
    model = optimizer.target
    if naive.rank == 1:
        replace(model, n_out)
        if is_set_up:
            optimizer.setup(model)
    for _ in range(2):
        with pytest.raises(RankMismatchError, match=text):
            update(optimizer)
    replace(model, n_out)
    optimizer.setup(model)
    update(optimizer, 2)
    assert same_everywhere(naive, model)


def replace(model, n_out):
    del model.main
    with model.init_scope():
        model.main = L.Linear(3, n_out)


# Updates of a step, those of all ranks but rank 1, and its own.
UPDATES = [(3, 6, 4), (3, 2, 4), (2, 4, 5), (1, 1, 2)]


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("double_buffering", [False, True])
def test_ranks_out_of_step_at_a_flush_are_told_why(comm, updates, double_buffering):
    steps, *of_ranks = updates
    settings = {"accumulate_steps": steps, "double_buffering": double_buffering}
    optimizer = sgd(comm, Model(0), **settings)

    def call():
        update(optimizer, of_ranks[comm.rank == 1])
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


@pytest.mark.parametrize("call", ["synchronize", "finalize", "flush"])
def test_what_one_rank_alone_calls_is_named(comm, call):
    optimizer = sgd(comm, Model(0))
    update(optimizer)
    do = update
    if comm.rank == 0:
        do = methodcaller(call)
    with pytest.raises(RankMismatchError, match=call):
        do(optimizer)
    update(optimizer)
    assert optimizer.t == 2
