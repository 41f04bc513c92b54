"""The multi-node optimizer behaves like the optimizer it is given."""

from __future__ import annotations

import copy
import re

import chainer
import chainer.links as L
import numpy as np
import pytest

from chainermn_comm import PeerError
from chainermn_train import create_multi_node_optimizer
from tests.support.training.linear import Model, X, bad_batch, sgd
from tests.support.training.trainers import same_everywhere
from tests.support.watchdog.records import recorded_progress

pytestmark = pytest.mark.world

# What is forwarded.


def test_attributes_are_those_of_the_actual_optimizer(naive):
    actual = chainer.optimizers.Adam(alpha=0.25)
    model = Model(0)
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
    assert optimizer.actual_optimizer is copy.copy(optimizer).actual_optimizer is actual
    assert optimizer.communicator is naive
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = optimizer.no_such_thing


def test_hooks_see_the_mean_gradient_and_can_be_removed(comm):
    model = Model(0)
    optimizer = sgd(comm, model)
    seen = []

    def see(caller):
        seen.append(caller)
        np.testing.assert_array_equal(model.main.b.grad, (comm.size - 1) / 2)

    optimizer.add_hook(see)
    optimizer.assume_synchronized()
    model.main.b.grad = np.full(2, comm.rank, np.float32)
    optimizer.update()
    optimizer.remove_hook("see")
    optimizer.update(model, X)
    assert seen == [optimizer.actual_optimizer]


# When parameters are broadcast.


@pytest.mark.parametrize(("n_in", "t"), [(2, 2), (None, 1)])
def test_parameters_added_later_are_broadcast_from_rank_0(comm, n_in, t):
    """Before the loss if they are initialised; else that update only broadcasts."""
    model = Model(comm.rank)
    optimizer = sgd(comm, model)
    optimizer.update(model, X)
    np.random.seed(comm.rank)
    model.add_link("more", L.Linear(n_in, 2))
    for param in model.more.params():
        param.update_rule = optimizer.create_update_rule()
    for number in range(2):
        np.random.seed(comm.rank)
        optimizer.update(model, X)
        assert optimizer.t == t + number
        assert same_everywhere(comm, model)


def test_a_link_that_is_not_used_yet_does_not_hinder_training(comm):
    model = Model(comm.rank)
    model.add_link("unused", L.Linear(None, 2))
    optimizer = sgd(comm, model)
    for _ in range(2):  # the first is lost: not all are initialised
        optimizer.update(model, X)
    assert optimizer.t == 1
    assert same_everywhere(comm, model.main)
    model.more = model.unused  # now it is used, on all ranks at the same time
    for _ in range(2):
        optimizer.update(model, X)
    assert optimizer.t == 2
    assert same_everywhere(comm, model)


# Mistakes.


def test_wrong_arguments_are_named(naive):
    sgd_of = chainer.optimizers.SGD
    with pytest.raises(TypeError, match=r"needs a Chainer optimizer.*not Model"):
        create_multi_node_optimizer(Model(0), naive)
    optimizer = create_multi_node_optimizer(sgd_of(), naive)
    with pytest.raises(TypeError, match="already a multi-node optimizer"):
        create_multi_node_optimizer(optimizer, naive)
    with pytest.raises(TypeError, match=r"needs a communicator made by.*not str"):
        create_multi_node_optimizer(sgd_of(), "naive")
    with pytest.raises(ValueError, match="overlap"):
        create_multi_node_optimizer(sgd_of(), naive, True, overlap=True)
    for steps, error in ((0, ValueError), (2.5, TypeError), (None, TypeError)):
        with pytest.raises(error, match=f"accumulate_steps.*not {steps}"):
            create_multi_node_optimizer(sgd_of(), naive, accumulate_steps=steps)


def test_an_optimizer_without_a_model_is_an_error_on_all_ranks(comm):
    model = Model(0)
    last = comm.size - 1
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    if comm.rank != last:
        optimizer.setup(model)
    error = RuntimeError if comm.rank == last else PeerError
    words = re.escape("call its `setup(model)` first")
    with pytest.raises(error, match=words) as raised:
        optimizer.update(model, X)
    assert comm.rank == last or f"rank {last}" in str(raised.value)
    optimizer.setup(model)
    optimizer.update(model, X)
    assert optimizer.t == 1


@pytest.mark.parametrize(
    ("args", "kwds", "examples"),
    [
        ((X, X[:1]), {}, len(X)),
        ((), {"x": X, "t": X[:1]}, len(X)),
        # The number isn't known.
        ((X[0, 0],), {}, 0),
        ((), {}, 0),
    ],
)
def test_an_update_and_its_examples_are_counted(naive, args, kwds, examples):
    """By the length of the loss function's first argument."""
    model = Model(0)
    optimizer = sgd(naive, model)
    before = recorded_progress()
    optimizer.update(lambda *_, **__: model(X), *args, **kwds)
    optimizer.update()
    with pytest.raises(FloatingPointError):
        optimizer.update(bad_batch, X)
    counted = np.subtract(recorded_progress(), before)
    assert counted.tolist() == [2, examples]
