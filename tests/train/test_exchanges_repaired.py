"""Ranks that came apart have rank 0's parameters and state again, and train on together."""

from __future__ import annotations

import contextlib
from functools import partial

import chainer
import chainer.functions as F
import chainer.links as L
import pytest

from tests.support.plugins.pairwise import pairwise
from tests.support.training.exchanges import HIERARCHICAL, KINDS, exchanging, states
from tests.support.training.stale import TanhNet, batch_of

pytestmark = [pytest.mark.world, HIERARCHICAL]

WIDTH, UPDATES = 5, 5
WHERE = ["before the step", "within the step", "after the step"]

net = partial(TanhNet, n_in=WIDTH, width=4)
batch = partial(batch_of, width=WIDTH)


class PlantedError(Exception):
    """What a hook raises."""


class FailingHooks:
    """Hooks that raise once, where they are told to."""

    def __init__(self, optimizer, model):
        self.fail_at = None
        optimizer.add_hook(partial(self.pass_by, WHERE[0]), name=WHERE[0])
        rule = model.second.b.update_rule  # others come before it, and others after it
        rule.add_hook(partial(self.pass_by, WHERE[1]), name=WHERE[1])
        optimizer.add_hook(
            partial(self.pass_by, WHERE[2]), name=WHERE[2], timing="post"
        )

    def pass_by(self, place, *_):
        if self.fail_at == place:
            self.fail_at = None
            raise PlantedError(place)


class Trained:
    """A model that has made some updates, with batches that are never the same."""

    def __init__(self, comm, kind, steps):
        self.comm, self.model, self.number = comm, net(comm.rank), 0
        self.optimizer = exchanging(
            kind, comm, chainer.optimizers.Adam(0.01), self.model, steps
        )
        self.seen = []

    def update(self, count=1):
        for _ in range(count):
            self.number += 1
            self.optimizer.update(self.loss, batch(self.comm.rank, self.number))

    def loss(self, x):
        self.seen = states(self.optimizer)
        return self.model(x)

    def everywhere(self):
        return self.comm.allgather_obj(states(self.optimizer))

    def assert_trains_on(self, until_step, steps):
        """All ranks step alike, each time after `steps` updates; the first after fewer or more."""
        for updates in until_step, steps, steps:
            t, before = self.optimizer.t, self.everywhere()
            assert before == before[:1] * self.comm.size
            self.update(updates)
            after = self.everywhere()
            assert after == after[:1] * self.comm.size
            assert after[0] != before[0]
            assert self.optimizer.t == t + 1
        self.optimizer.finalize()


# Hooks that fail.


@pytest.mark.sizes(2, 3, 4)
@pairwise(kind=KINDS, steps=[1, 2], where=WHERE, failing=[0, -1])
def test_after_a_hook_has_failed_on_one_rank_all_have_rank_0s_state(
    comm, kind, steps, where, failing
):
    """In the update in which it is noticed nobody steps."""
    job = Trained(comm, kind, steps)
    hooks = FailingHooks(job.optimizer, job.model)
    job.update(UPDATES * steps - 1)
    fails = comm.rank == failing % comm.size
    hooks.fail_at = where if fails else None
    with pytest.raises(PlantedError) if fails else contextlib.nullcontext():
        job.update()
    found = job.everywhere()
    assert (found == found[:1] * comm.size) == (where == "after the step")
    job.update()
    assert job.everywhere() == found[:1] * comm.size
    job.assert_trains_on(steps * (1 + KINDS[kind].delay), steps)


@pytest.mark.sizes(2, 3, 4)
@pairwise(kind=KINDS, steps=[1, 2], where=WHERE)
def test_after_hooks_have_failed_on_all_ranks_they_have_rank_0s_state(
    comm, kind, steps, where
):
    """All hear of it after backward: others may communicate in their losses by then."""
    job = Trained(comm, kind, steps)
    hooks = FailingHooks(job.optimizer, job.model)
    job.update(UPDATES * steps - 1)
    hooks.fail_at = where if comm.rank == 0 else WHERE[WHERE.index(where) - 1]
    with pytest.raises(PlantedError):
        job.update()
    found = job.everywhere()
    assert found != found[:1] * comm.size
    job.update()
    assert job.everywhere() == found[:1] * comm.size
    job.assert_trains_on(steps * (1 + KINDS[kind].delay), steps)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("steps", "left"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("failing", [0, -1])
def test_a_hook_that_fails_in_a_flush_leaves_ranks_in_step(
    comm, kind, steps, left, failing
):
    """A group that is left is used all the same; the first update after it is lost."""
    job = Trained(comm, kind, steps)
    hooks = FailingHooks(job.optimizer, job.model)
    job.update(UPDATES * steps + left)
    is_used = left or KINDS[kind].delay
    fails = is_used and comm.rank == failing % comm.size
    hooks.fail_at = WHERE[0] if fails else None
    with pytest.raises(PlantedError) if fails else contextlib.nullcontext():
        job.optimizer.flush()
    found = job.everywhere()
    assert (found == found[:1] * comm.size) == (not is_used)
    if is_used:
        job.update()
        assert job.everywhere() == found[:1] * comm.size
    job.assert_trains_on(steps * (1 + KINDS[kind].delay), steps)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("failing", [0, -1])
def test_a_dynamic_loss_scale_is_rank_0s_after_a_hook_has_failed(
    comm, kind, where, failing
):
    """And no more than one update is lost."""
    job = Trained(comm, kind, steps=1)
    job.optimizer.loss_scaling(interval=1)
    hooks = FailingHooks(job.optimizer, job.model)
    job.update(UPDATES)
    fails = comm.rank == failing % comm.size
    hooks.fail_at = where if fails else None
    with pytest.raises(PlantedError) if fails else contextlib.nullcontext():
        job.update()
    scales = comm.allgather_obj(job.optimizer._loss_scale)
    assert len(set(scales)) == 2
    job.update()
    assert comm.allgather_obj(job.optimizer._loss_scale) == scales[:1] * comm.size
    job.assert_trains_on(1 + KINDS[kind].delay, 1)


# Parameters that change.


def replace_second(model, optimizer):
    outputs, inputs = model.second.W.shape
    del model.second
    model.add_link("second", L.Linear(inputs, outputs))
    for param in model.second.params():
        param.update_rule = optimizer.create_update_rule()


@pytest.mark.sizes(2, 3, 4)
@pairwise(kind=KINDS, steps=[1, 2], changing=[0, -1], in_group=[False, True])
def test_parameters_that_one_rank_replaces_are_rank_0s_everywhere(
    comm, kind, steps, changing, in_group
):
    """In the update in which it is noticed nobody steps; what was added up is dropped."""
    job = Trained(comm, kind, steps)
    already = int(in_group and steps > 1)
    job.update(UPDATES * steps + already)
    if comm.rank == changing % comm.size:
        replace_second(job.model, job.optimizer)
    found = job.everywhere()
    assert found != found[:1] * comm.size
    job.update()
    assert job.everywhere() == found[:1] * comm.size
    job.assert_trains_on(steps * (1 + KINDS[kind].delay), steps)


class Late(chainer.Chain):
    """The last layer has no values before it is used."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first, self.late = L.Linear(WIDTH, 4), L.Linear(None, 3)

    def __call__(self, x, is_late):
        h = F.tanh(self.first(x))
        return F.mean(h**2) + (F.mean(self.late(h) ** 2) if is_late else 0)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("using", [0, -1])
def test_a_layer_that_one_rank_alone_uses_first_gets_values_on_all(comm, kind, using):
    """In the update in which it is noticed nobody steps."""
    model = Late()
    optimizer = exchanging(kind, comm, chainer.optimizers.Adam(0.01), model)
    for number in range(UPDATES):
        optimizer.update(model, batch(comm.rank, number), is_late=False)
    t = optimizer.t
    optimizer.update(model, batch(comm.rank, 0), is_late=comm.rank == using % comm.size)
    found = states(optimizer)
    assert optimizer.t == t
    assert model.late.W.shape == (3, 4)
    for number in range(UPDATES):
        optimizer.update(
            model, batch(comm.rank, number), is_late=number % comm.size == comm.rank
        )
        assert comm.allgather_obj(states(optimizer)) == [states(optimizer)] * comm.size
    optimizer.flush()
    assert optimizer.t == t + UPDATES
    assert all(
        value != states(optimizer)[key]
        for key, value in found.items()
        if "late/W" in key
    )
    optimizer.finalize()


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changing", [0, -1])
def test_gradients_of_parameters_that_one_rank_replaced_move_no_others(
    comm, kind, changing
):
    """Those of the update before, of a group of two, and of that in which it is noticed."""
    model, seen = net(0), []
    optimizer = exchanging(kind, comm, chainer.optimizers.SGD(0.1), model, steps=2)
    optimizer.assume_synchronized()
    optimizer.add_hook(lambda _: seen.append(model.second.b.grad.tolist()), name="see")
    for factor in 64, 8, 1:
        optimizer.update(lambda factor=factor: factor * F.sum(model.second.b))
        if factor == 64 and comm.rank == changing % comm.size:
            replace_second(model, optimizer)
    optimizer.flush()
    # Of the last update alone.
    assert comm.allgather_obj(seen) == [[[1] * 3]] * comm.size
    optimizer.finalize()
