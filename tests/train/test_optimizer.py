"""The multi-node optimizer behaves like the optimizer it is given."""

from __future__ import annotations

import copy
import re
from typing import Any

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer.training import extensions

from chainermn_comm import PeerError, RankMismatchError
from chainermn_train import create_multi_node_optimizer
from tests.support.training.linear import Model, X, bad_batch, sgd
from tests.support.training.trainers import parameters, same_everywhere, trainer_over
from tests.support.watchdog.records import recorded_progress

pytestmark = pytest.mark.world

# What is forwarded.


def test_attributes_are_those_of_the_actual_optimizer(naive):
    actual, model = chainer.optimizers.Adam(alpha=0.25), Model(0)
    optimizer = create_multi_node_optimizer(actual, naive)
    assert optimizer.setup(model) is optimizer
    assert optimizer.target is actual.target is model
    assert (optimizer.t, optimizer.epoch, optimizer.alpha) == (0, 0, 0.25)
    optimizer.alpha = 0.5
    optimizer.new_epoch()
    optimizer.use_auto_new_epoch = True
    assert actual.alpha == actual.hyperparam.alpha == 0.5
    assert actual.use_auto_new_epoch
    assert actual.epoch == 1
    assert optimizer.actual_optimizer is actual
    assert optimizer.communicator is naive
    assert {"alpha", "hyperparam", "target", "communicator", "update"} <= set(
        dir(optimizer)
    )
    optimizer.note = 1
    del optimizer.note
    assert not hasattr(actual, "note")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = optimizer.no_such_thing
    with pytest.raises(AttributeError, match="'communicator'"):
        del optimizer.communicator


def test_hooks_see_the_mean_gradient_and_can_be_removed(comm):
    model = Model(0)
    optimizer = sgd(comm, model)
    seen: list[Any] = []
    see = lambda caller: seen.append((caller, caller.target.main.b.grad.copy()))  # noqa: E731
    optimizer.add_hook(see, name="see")
    optimizer.add_hook(lambda caller: seen.append("after"), name="after", timing="post")
    optimizer.update(model, X)
    before = parameters(model)
    seen.clear()
    model.cleargrads()
    model.main.b.grad = np.full(2, comm.rank, np.float32)
    optimizer.update()
    assert [seen[0][0], seen[1]] == [optimizer.actual_optimizer, "after"]
    mean = (comm.size - 1) / 2
    np.testing.assert_array_equal(seen[0][1], np.full(2, mean, np.float32))
    np.testing.assert_allclose(
        model.main.b.array, before["/main/b"] - 0.5 * mean, rtol=1e-6
    )
    np.testing.assert_array_equal(model.main.W.array, before["/main/W"])
    optimizer.remove_hook("see")
    optimizer.remove_hook("after")
    seen.clear()
    optimizer.call_hooks("pre")
    optimizer.update(model, X)
    assert seen == []


def test_a_deep_copy_trains_on_with_the_same_communicator(comm):
    """And with what it has added up, which is its own."""
    model = Model(comm.rank)
    optimizer = sgd(comm, model, accumulate_steps=2)
    optimizer.update(model, X)
    assert copy.copy(optimizer).actual_optimizer is optimizer.actual_optimizer
    twin = copy.deepcopy(optimizer)
    assert twin.communicator is comm
    assert twin.target is not model
    for each in optimizer, twin:
        each.target.cleargrads()
        each.target(X).backward()
        # Steps: the copy's parameters are known to be the same everywhere.
        each.update()
        assert each.t == 1
    for name, array in parameters(twin.target).items():
        np.testing.assert_array_equal(array, parameters(model)[name])


def test_learning_rate_extensions_in_a_trainer(comm, tmp_path):
    """And an optimizer that was set up before it is made multi-node."""
    model = Model(comm.rank)
    actual = chainer.optimizers.MomentumSGD(lr=0.5).setup(model)
    optimizer = create_multi_node_optimizer(actual, comm)
    examples = np.roll(X, comm.rank, axis=0)
    trainer = trainer_over(examples, 2, optimizer, (6, "iteration"), tmp_path)
    trainer.extend(extensions.ExponentialShift("lr", 0.5), trigger=(2, "iteration"))
    shift = extensions.LinearShift("momentum", (0.9, 0.5), (0, 4))
    trainer.extend(shift, trigger=(1, "iteration"))
    trainer.extend(extensions.observe_lr(), trigger=(1, "iteration"))
    trainer.run()
    assert optimizer.t == 6
    assert optimizer.lr == optimizer.actual_optimizer.lr == 0.5**4
    assert optimizer.momentum == 0.5
    assert optimizer.epoch == trainer.updater.epoch > 0  # the updater calls new_epoch
    assert trainer.observation["lr"] == 0.5**3  # observed before it is shifted
    assert same_everywhere(comm, model)


# When parameters are broadcast.


def test_the_first_update_without_a_loss_broadcasts_and_does_not_step(comm):
    model, expected = Model(comm.rank), parameters(Model(0))
    optimizer = sgd(comm, model)
    for t in 0, 1:
        model.cleargrads()
        model(X).backward()
        optimizer.update()
        assert optimizer.t == t
        assert same_everywhere(comm, model)
        assert np.array_equal(model.main.W.array, expected["/main/W"]) == (t == 0)


@pytest.mark.parametrize(
    ("ts", "how"),
    [
        ((0, 1), {}),
        ((0, 0, 1), {"double_buffering": True}),
        ((0, 0, 0, 1), {"accumulate_steps": 3}),
    ],
)
def test_lazily_initialised_links_start_one_update_later(comm, ts, how):
    model = Model(comm.rank, None)
    optimizer = sgd(comm, model, **how)
    for t in ts:
        optimizer.update(model, X)
        assert optimizer.t == t
    assert same_everywhere(comm, model)


@pytest.mark.sizes(2, 3, 4)
def test_a_change_on_one_rank_is_a_change_on_all(comm):
    """Only rank 1 replaces its parameters: nobody steps, and all ranks get those of rank 0."""
    model = Model(comm.rank)
    optimizer = sgd(comm, model)
    optimizer.update(model, X)
    if comm.rank == 1:
        del model.main
        add(model, optimizer, "main", Model(99).main)
    for t in 1, 2:
        optimizer.update(model, X)
        assert optimizer.t == t
        assert same_everywhere(comm, model)


def add(model, optimizer, name, link):
    model.add_link(name, link)
    for param in link.params():
        param.update_rule = optimizer.create_update_rule()


@pytest.mark.parametrize(("n_in", "t"), [(2, 2), (None, 1)])
def test_parameters_added_later_are_broadcast_from_rank_0(comm, n_in, t):
    """Before the loss if they are initialised; else that update only broadcasts."""
    model = Model(comm.rank)
    optimizer = sgd(comm, model)
    optimizer.update(model, X)
    np.random.seed(comm.rank)
    add(model, optimizer, "more", L.Linear(n_in, 2))
    np.random.seed(comm.rank)
    for number in range(2):
        optimizer.update(model, X)
        assert optimizer.t == t + number
        assert same_everywhere(comm, model)
    assert np.all(np.isfinite(model.more.W.array))


def test_a_link_that_is_not_used_yet_does_not_hinder_training(comm):
    model = Model(comm.rank)
    model.add_link("unused", L.Linear(None, 2))
    optimizer = sgd(comm, model)
    for _ in range(2):  # the first is lost: not all are initialised
        optimizer.update(model, X)
    assert optimizer.t == 1
    # The check can fail.
    assert same_everywhere(comm, Model(comm.rank)) == (comm.size == 1)
    mine = model.main.W.array.tobytes()
    assert comm.allgather_obj(mine) == [mine] * comm.size
    model.more = model.unused  # now it is used, on all ranks at the same time
    for _ in range(2):
        optimizer.update(model, X)
    assert optimizer.t == 2
    assert same_everywhere(comm, model)


# Missing gradients.


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("zero_fill", [True, False])
def test_a_missing_gradient_counts_as_zeros_or_ranks_must_agree(naive, zero_fill):
    model = Model(0)
    optimizer = sgd(naive, model, zero_fill=zero_fill)
    optimizer.update(model, X)
    before = parameters(model)
    model.cleargrads()
    if naive.rank == 0:
        model.main.b.grad = np.ones(2, np.float32)
    if zero_fill:
        optimizer.update()
        before["/main/b"] -= 0.5 / naive.size
    else:
        with pytest.raises(RankMismatchError, match="/main/b"):
            optimizer.update()
        model.cleargrads()
        optimizer.update()
    assert optimizer.t == 2
    np.testing.assert_allclose(model.main.b.array, before["/main/b"], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(model.main.W.array, before["/main/W"])


class OwnOptimizer:
    """An optimizer of the user's own class, with the least that one needs."""

    def __init__(self):
        self.t = 0
        self.target = None

    def setup(self, link):
        self.target = link
        return self

    def update(self, lossfun=None):
        assert lossfun is None
        self.t += 1


def test_an_optimizer_of_any_class_serves(naive):
    model = Model(naive.rank)
    optimizer = create_multi_node_optimizer(OwnOptimizer(), naive).setup(model)
    for _ in range(3):
        optimizer.update(model, X)
    assert optimizer.t == 3
    assert same_everywhere(naive, model)


# Mistakes.


def test_wrong_arguments_are_named(naive):
    with pytest.raises(TypeError, match=r"needs a Chainer optimizer.*not Model"):
        create_multi_node_optimizer(Model(0), naive)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), naive)
    with pytest.raises(TypeError, match="already a multi-node optimizer"):
        create_multi_node_optimizer(optimizer, naive)
    with pytest.raises(TypeError, match=r"needs a communicator made by.*not str"):
        create_multi_node_optimizer(chainer.optimizers.SGD(), "naive")
    for steps, error in ((0, ValueError), (2.5, TypeError), (None, TypeError)):
        with pytest.raises(error, match=f"accumulate_steps.*not {steps}"):
            sgd(naive, Model(0), accumulate_steps=steps)


def test_an_optimizer_without_a_model_is_an_error_on_all_ranks(comm):
    model = Model(0)
    last = comm.size - 1
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    if comm.rank != last:
        optimizer.setup(model)
    error = RuntimeError if comm.rank == last else PeerError
    with pytest.raises(
        error, match=re.escape("call its `setup(model)` first")
    ) as raised:
        optimizer.update(model, X)
    assert comm.rank == last or f"rank {last}" in str(raised.value)
    optimizer.setup(model)
    optimizer.update(model, X)
    assert optimizer.t == 1


@pytest.mark.parametrize(
    ("args", "kwds", "examples"),
    [
        ((X, X[:1]), {}, len(X)),
        (([X, X, X],), {}, 3),
        ((), {"x": X, "t": X[:1]}, len(X)),
        # It isn't known.
        ((X[0, 0],), {}, 0),
        (({"x": X, "t": X},), {}, 0),
        ((), {}, 0),
    ],
)
def test_an_update_and_its_examples_are_counted(naive, args, kwds, examples):
    """By the length of the loss function's first argument."""
    model = Model(0)
    optimizer = sgd(naive, model)
    before = recorded_progress()
    optimizer.update(lambda *_, **__: model(X), *args, **kwds)
    assert np.subtract(recorded_progress(), before).tolist() == [1, examples]
    optimizer.update()
    assert np.subtract(recorded_progress(), before).tolist() == [2, examples]
    with pytest.raises(FloatingPointError):
        optimizer.update(bad_batch, X)
    assert np.subtract(recorded_progress(), before).tolist() == [2, examples]
