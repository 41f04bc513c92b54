"""Named sequences of what happens to an optimizer of all ranks; the oracle judges each command."""

from __future__ import annotations

from unittest import mock

import pytest
from chainer import Parameter
from chainer.optimizers import SGD

from tests.support.oracles.raised import raises_on_all
from tests.support.plugins.pairwise import pairwise
from tests.support.training.exchanges import KINDS, WHOLE_KINDS, exchanging
from tests.support.training.small_models import Model, update
from tests.support.training.trainers import same_everywhere
from tests.train.optimizer_machine.oracle import DRIFTS
from tests.train.optimizer_machine.trainee import ALL, IN_LOSS, IN_STEP, Config

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]

SEQUENCES = {}


def sequence(**config):
    """A function of `play`, ranks and steps is a row of the table, with this configuration."""

    def add(function):
        SEQUENCES[f"{function.__name__} {config}"] = function, config
        return function

    return add


# What fails.


@sequence(optimizer="Adam")
@sequence(scaling="dynamic")
def hooks_fail(play, rank, steps):
    """On one rank; or on all, on some of them elsewhere."""
    for where in IN_STEP:
        on_one = dict.fromkeys(rank, where)
        for fails in on_one, {**dict.fromkeys(ALL, "rule"), **on_one}:
            play.update(3 * steps - 1)
            play.update(fails=fails)
            play.update()


@sequence(optimizer="Adam")
def a_hook_fails_in_a_flush(play, rank, steps):
    for left in 0, 1:
        play.update(2 * steps + left)
        play.do("flush", fails=dict.fromkeys(rank, "pre"))
        play.update()


@sequence(scaling="dynamic")
def a_hook_fails_in_a_step_that_overflows(play, rank, steps):
    """With double buffering the failing step is along the accumulation before."""
    for where in "pre", "post":
        play.update(3 * steps)
        before = steps * (1 + play.config.delay) - 1
        play.update(before, overflowing=ALL)
        play.update(overflowing=ALL, fails=dict.fromkeys(rank, where))
        play.update()


@sequence(hooks=True)
@sequence(scaling=8.0)
def losses_fail(play, rank, steps):
    for where in IN_LOSS:
        for failing in rank, ALL:
            play.update(steps - 1)
            play.update(2, fails=dict.fromkeys(failing, where))
    play.do("flush")


@sequence(steps=1, communicates=True)
@sequence(steps=1, communicates=True, scaling="dynamic")
def it_fails_on_a_rank_beside_losses_that_communicate(play, rank, steps):
    """The others are in the loss, or in its backward; or in the next loss, if a step fails."""
    play.update(3)
    for where in IN_LOSS:
        play.update(2, fails=dict.fromkeys(rank, where))
    for where in IN_STEP:
        play.update(2)
        play.update(fails=dict.fromkeys(rank, where))
        play.update()


# Gradients that a rank doesn't have, and scales.


@sequence(scaling="dynamic")
def a_flush_undoes_the_scale_where_a_rank_has_no_gradient(play, rank, steps):
    for before in steps, 0:
        play.update(before)
        play.update(unused=rank)
        play.do("flush")


@sequence(scaling=8.0)
@sequence(scaling=0.5, optimizer="Adam")
def a_scale_is_set_within_a_group(play, rank, steps):
    play.update(2 * steps + 1, unused=rank)
    play.do("set_loss_scale", scale=256.0)
    play.update(2 * steps - 1, unused=rank)
    play.do("flush")


@sequence()
@sequence(scaling=8.0)
def a_backward_of_the_users_has_another_scale(play, rank, steps):
    play.update(2 * steps)
    play.update(2 * steps, without_loss=rank)


@sequence(scaling=8.0, on_drift="raise")
@sequence(scaling=8.0, on_drift="ignore")
def a_scale_that_one_rank_has_changed_is_named(play, rank, steps):
    play.update(2 * steps)
    play.do("set_loss_scale", ranks=rank, scale=64.0)
    play.update(2)
    play.do("set_loss_scale", scale=64.0)


@sequence(zero_fill=False)
def ranks_disagree_on_which_gradients_are_missing(play, rank, steps):
    play.update(2 * steps, unused=ALL)
    play.update(steps, unused=rank)
    play.update(steps)


# Parameters that change.


@sequence(optimizer="Adam")
@sequence(optimizer="MomentumSGD", is_lazy=True)
def parts_are_replaced_and_added(play, rank, steps):
    for name, who in ("second", rank), ("second", ALL), ("third", ALL):
        for command in "update", "flush":
            play.update(2 * steps + steps // 2)
            play.replace(who, name)
            play.do(command)


@sequence(is_lazy=True)
@sequence(is_lazy=True, scaling=8.0, optimizer="Adam")
def one_rank_uses_a_part_first(play, rank, steps):
    play.update(3 * steps, unused=ALL)
    play.update(3 * steps, unused=rank)


@sequence(is_lazy=True)
def a_part_that_rank_0_has_no_values_of_is_another_ranks(play, rank, steps):
    play.replace([play.size - 1])
    play.do("flush")
    play.update(steps)


@sequence(optimizer="Adam")
def a_part_that_one_rank_adds_first_is_named(play, rank, steps):
    play.update(3 * steps)
    play.replace(rank, "third")
    play.do("flush")
    play.update()
    play.replace(ALL, "third")


@sequence(is_lazy=True, on_drift="ignore")
def what_is_refused_leaves_values_as_they_were(play, rank, steps):
    """Rank 0 has none, and another rank others than the first that has some."""
    play.update(3 * steps)
    play.do("disturb", ranks=[play.size - 1], what="parameter")
    play.do("setup", ranks=[0], seed=20)
    play.replace([1], "third")
    play.do("flush")


@sequence(optimizer="MomentumSGD")
def one_rank_replaces_a_part_while_all_add_one(play, rank, steps):
    """Old momenta don't meet new ones."""
    play.update(3 * steps)
    play.replace(ALL, "third")
    play.replace(rank)
    play.update(steps)


@sequence()
@sequence(scaling="dynamic")
def another_model_is_set_up(play, rank, steps):
    """No accumulation nor flight of the one before is left."""
    for left in 0, steps - 1:
        play.update(2 * steps + left)
        play.do("setup", ranks=ALL, seed=20)


@sequence(steps=1)
@sequence(steps=2)
def one_rank_loads_or_sets_up_another_model(play, rank, steps):
    """The others' next update is collective, too."""
    play.update(2 * steps)
    play.do("save")
    play.update(2 * steps - 1)
    play.do("load", ranks=rank)
    play.update(steps + 1)
    play.do("setup", ranks=rank, seed=20)
    play.update(2)


# States that drift, or are loaded.


@sequence(scaling="dynamic", optimizer="Adam")
@sequence(scaling="dynamic", on_drift="synchronize")
@sequence(scaling="dynamic", on_drift="ignore")
def a_ranks_memory_changes(play, rank, steps):
    for what in DRIFTS:
        play.update(2 * steps)
        play.do("disturb", ranks=rank, what=what)
        play.update(steps)
        play.do("synchronize")


@sequence()
@sequence(optimizer="Adam", scaling="dynamic")
def parts_are_replaced_before_a_save_or_later(play, rank, steps):
    """Gradients of the old ones move no others, on any rank."""
    commands = ["save", "renew", "load", "update"]
    for who in rank, ALL:
        for moment in commands:
            play.update(3 * steps - 1)
            for command in commands:
                if command == moment:
                    play.replace(who)
                play.do(command)
            play.update(2 * steps - 1)


@sequence()
def a_part_is_replaced_where_ranks_assume_one_state(play, rank, steps):
    for who in rank, ALL:
        play.update(2 * steps)
        play.do("save")
        play.do("load", assume=True)
        play.replace(who)
        play.update(2 * steps)


@sequence()
def a_part_is_replaced_before_a_save_between_two_steps(play, rank, steps):
    """The rank's next update is collective when the others' is."""
    play.update(2 * steps + 1)
    play.replace(rank)
    play.do("save")
    play.update(steps)


@sequence(scaling="dynamic")
def ranks_load_what_they_saved_at_different_moments(play, rank, steps):
    """All have rank 0's state, with its gradients in flight and its scale."""
    for left in 0, 1:
        play.update(3 * steps + left)
        play.do("save")
        play.update(2 * steps)
        play.do("save", ranks=rank)
        play.do("renew")
        play.do("load")
        play.update(2 * steps)


@sequence(is_lazy=True, optimizer="Adam")
def a_part_is_saved_that_has_values_and_no_moments(play, rank, steps):
    play.update(2 * steps, unused=ALL)
    play.update(steps, unused=rank)
    play.do("save")
    play.do("load")
    play.update(steps)


@sequence(optimizer="Adam", scaling="dynamic")
def one_rank_cannot_load(play, rank, steps):
    play.update(3 * steps)
    play.do("save")
    play.do("load", broken=rank)
    play.update()


# Batches that not all ranks have.


@sequence(hooks=True)
@sequence(scaling="dynamic", optimizer="Adam")
@sequence(zero_fill=False)
def ranks_have_other_numbers_of_batches(play, rank, steps):
    play.update(steps + 1)
    for counts in (0, 2, 1), (3, 0, 1, 2), (0,), (5, 6):
        play.do("join", counts=counts)
    play.do("flush")


@sequence(is_lazy=True)
def a_rank_without_batches_lacks_values(play, rank, steps):
    """They are those of the first rank that has batches."""
    play.do("synchronize")
    counts = [0 if each in rank else 2 * steps for each in range(play.size)]
    play.do("join", counts=counts)


@sequence()
def a_rank_skips_a_batch_after_others_have_left(play, rank, steps):
    """The failed update counts on no rank, or between two steps one gradient less."""
    for at in 1, 2:
        play.update(2 * steps)
        play.do(
            "join", counts=(1, 3, 5, 7), fails=dict.fromkeys(rank, "forward"), at=at
        )


@pairwise(name=SEQUENCES, kind=KINDS, steps=[1, 2, 3], rank=[0, -1])
def test_sequence(play, name, kind, steps, rank):
    function, config = SEQUENCES[name]

    def lead(play):
        play.begin(Config(**{"kind": kind, "steps": steps, **config}))
        function(play, [rank % play.size], play.config.steps)
        play.end()

    failure = play.run(lead)
    assert not failure, failure


class Counting:
    """An optimizer of the user's, which counts nothing, and knows no loss scale."""

    target = None

    def setup(self, link):
        self.target = link
        return self

    def update(self, lossfun=None, *args, **kwds):
        for param in self.target.params():
            param.array -= 0.1 * param.grad


@pytest.mark.parametrize("kind", WHOLE_KINDS)
def test_an_optimizer_of_the_users_needs_no_count_of_steps(comm, kind):
    optimizer = exchanging(kind, comm, Counting(), Model(comm.rank))
    update(optimizer, 5)
    optimizer.synchronize()
    assert same_everywhere(comm, optimizer.target)
    optimizer.finalize()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 2])
def test_memory_that_runs_out_on_a_rank_leaves_ranks_in_step(
    comm, monkeypatch, kind, steps
):
    """In an update, where gradients are read."""
    optimizer = exchanging(kind, comm, SGD(), Model(0), steps)
    update(optimizer, 3 * steps - 1)
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            getter = mock.PropertyMock(side_effect=MemoryError)
            patch.setattr(Parameter, "grad", getter)
        with raises_on_all(comm.rank == 1, MemoryError):
            optimizer.update()
    update(optimizer, 2 * steps)
    assert same_everywhere(comm, optimizer.target)
    optimizer.finalize()
