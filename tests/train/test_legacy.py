"""The optimizer class of ChainerMN 1.x: what it has, and what it shares with other ranks."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy

import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
import pytest
from chainer import Sequential
from chainer.optimizers import SGD, Adam
from chainermn.optimizers import _MultiNodeOptimizer
from numpy.random import RandomState

from chainermn_comm import PeerError
from tests.support.training.small_models import Model, bad_batch
from tests.support.training.trainers import (
    load_state,
    parameter_bits,
    same_everywhere,
    state_of,
)
from tests.support.worlds.third_party import PlainCommunicator

WORLD = pytest.mark.world


def batch(rank, number):
    return RandomState((rank, number)).uniform(-1, 1, (2, 3)).astype("f4")


@pytest.fixture(params=["ours", "third party"])
def communicator(request, world, naive):
    if request.param == "ours":
        return naive
    return PlainCommunicator(world)


@WORLD
def test_lazy_parameters_and_added_ones_come_from_rank_0(naive):
    np.random.seed(naive.rank)
    model = Sequential()
    optimizer = _MultiNodeOptimizer(SGD(), naive, True)
    x = batch(naive.rank, 0)
    for added in L.Linear(None, 3), L.Linear(3, 2):
        model.append(added)
        optimizer.setup(model)
        for steps in 0, 1:
            optimizer.update(lambda: F.sum(model(x)))
            assert optimizer.t == steps
            assert same_everywhere(naive, model)


@WORLD
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("at", [0, 2])
def test_a_loss_that_fails_on_one_rank_is_raised_on_all(communicator, at):
    comm = communicator
    model = Model(comm.rank)
    optimizer = _MultiNodeOptimizer(SGD(), comm, True).setup(model)
    for number in range(5):
        loss = model
        expected = nullcontext()
        if number == at:
            expected = pytest.raises(PeerError)
        if number == at and comm.rank == 1:
            loss = bad_batch
            expected = pytest.raises(FloatingPointError)
        with expected:
            optimizer.update(loss, batch(comm.rank, number))
    assert optimizer.t == 3
    assert same_everywhere(comm, model)


def test_four_attributes_are_its_own_and_all_others_are_handed_on():
    comm = chainermn.create_communicator("naive")
    actual = Adam()
    optimizer = _MultiNodeOptimizer(actual, comm, zero_fill=False)
    own = {
        "actual_optimizer": actual,
        "communicator": comm,
        "target_params": [],
        "zero_fill": False,
    }
    assert vars(optimizer) == own
    optimizer.setup(Model(0))
    optimizer.alpha = 0.5
    optimizer.note = "kept"
    object.__setattr__(optimizer, "own", 1)
    assert actual.alpha == 0.5
    assert actual.note == "kept"
    assert not vars(actual).keys() & {"own", *own}
    assert optimizer.target is actual.target
    called = []
    optimizer.add_hook(called.append, "called")
    optimizer.call_hooks("pre")
    assert called == [actual]
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = optimizer.nothing_of_the_kind


def test_it_is_saved_loaded_and_copied_as_its_actual_optimizer():
    comm = chainermn.create_communicator("naive")
    first, second = [
        _MultiNodeOptimizer(Adam(), comm).setup(Model(seed)) for seed in (0, 1)
    ]
    for number in range(3):
        first.update(first.target, batch(0, number))
    load_state(second, state_of(first))
    assert second.t == 2
    twin = deepcopy(first)
    assert twin.communicator is comm
    assert twin.target is not first.target
    assert twin.target_params == first.target_params


def test_without_a_communicator_an_update_says_what_is_missing():
    model = Model(0)
    optimizer = _MultiNodeOptimizer(Adam(), None).setup(model)
    before = parameter_bits(model)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"create_communicator .* not NoneType"):
            optimizer.update(model, batch(0, 0))
    assert parameter_bits(model) == before
    assert state_of(optimizer)["t"] == 0
