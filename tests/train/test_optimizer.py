"""The multi-node optimizer behaves like the optimizer it is given."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext

import chainer.links as L
import numpy as np
import pytest
from chainer.optimizers import SGD, Adam
from numpy.testing import assert_array_equal

from chainermn_train import create_multi_node_optimizer, join
from tests.support.oracles.raised import raises_on_all
from tests.support.training.small_models import Model, X, bad_batch, sgd, update
from tests.support.training.trainers import same_everywhere
from tests.support.watchdog.records import recorded_progress

pytestmark = pytest.mark.world

# What is forwarded.


def test_attributes_are_those_of_the_actual_optimizer(naive):
    actual = Adam(alpha=0.25)
    model = Model(0)
    optimizer = create_multi_node_optimizer(actual, naive)
    assert optimizer.setup(model) is optimizer
    assert optimizer.target is actual.target is model
    assert optimizer.t == 0
    assert optimizer.epoch == 0
    assert optimizer.alpha == 0.25
    optimizer.alpha = 0.5
    optimizer.new_epoch()
    optimizer.use_auto_new_epoch = True
    assert actual.alpha == 0.5
    assert actual.hyperparam.alpha == 0.5
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
        assert_array_equal(model.main.b.grad, (comm.size - 1) / 2)

    optimizer.add_hook(see)
    optimizer.assume_synchronized()
    model.main.b.grad = np.full(2, comm.rank, np.float32)
    optimizer.update()
    optimizer.remove_hook("see")
    optimizer.update(model, X)
    assert seen == [optimizer.actual_optimizer]


def test_a_lazy_link_that_is_added_later_costs_one_update(comm):
    """It is used under two names, and another one not at all."""
    model = Model(comm.rank)
    optimizer = sgd(comm, model)
    update(optimizer)
    np.random.seed(comm.rank)
    model.add_link("more", L.Linear(None, 2))
    model.add_link("unused", L.Linear(None, 2))
    model.add_link("same", model.more)
    for link in model.more, model.unused:
        for param in link.params():
            param.update_rule = optimizer.create_update_rule()
    for t in 1, 2:
        update(optimizer)
        assert optimizer.t == t
        assert same_everywhere(comm, model)


# Mistakes.


@pytest.mark.parametrize(
    ("actual", "arguments", "error", "words"),
    [
        (Model(0), {}, TypeError, "needs a Chainer optimizer.*not Model"),
        (SGD(), {"communicator": "naive"}, TypeError, "communicator made by.*not str"),
        (SGD(), {"double_buffering": True, "overlap": True}, ValueError, "overlap"),
        (SGD(), {"accumulate_steps": 0}, ValueError, "accumulate_steps.*not 0"),
        (SGD(), {"accumulate_steps": 2.5}, TypeError, "accumulate_steps.*not 2.5"),
        (SGD(), {"accumulate_steps": None}, TypeError, "accumulate_steps.*not None"),
    ],
)
def test_wrong_arguments_are_named(naive, actual, arguments, error, words):
    with pytest.raises(error, match=words):
        create_multi_node_optimizer(actual, **{"communicator": naive, **arguments})


def test_an_optimizer_is_wrapped_once(naive):
    with pytest.raises(TypeError, match="already a multi-node optimizer"):
        create_multi_node_optimizer(sgd(naive, Model(0)), naive)


@pytest.mark.parametrize("joins", [False, True])
def test_an_optimizer_without_a_model_is_an_error_on_all_ranks(comm, joins):
    """Also of a rank that takes part without examples."""
    model = Model(0)
    last = comm.size - 1
    is_last = comm.rank == last
    optimizer = create_multi_node_optimizer(SGD(), comm)
    if not is_last:
        optimizer.setup(model)

    def train():
        if joins:
            context = join(optimizer)
        else:
            context = nullcontext()
        with context:
            if not (joins and is_last):
                optimizer.update(model, X)

    words = re.escape("call its `setup(model)` first")
    with raises_on_all(is_last, RuntimeError, words) as raised:
        train()
    assert is_last or f"rank {last}" in str(raised.value)
    optimizer.setup(model)
    update(optimizer)
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
