"""What is set on an optimizer is the same on all ranks, in whatever way and whenever it is set."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
from chainer.optimizers import MSVAG, SGD, Adam

from chainermn_comm import RankMismatchError
from chainermn_train import create_multi_node_optimizer
from tests.support.training.small_models import Model, sgd, update
from tests.support.training.trainers import same_everywhere

pytestmark = pytest.mark.world


NUMBERS = [
    *[
        (kind(0.125), kind(0.5))
        for kind in (float, np.float16, np.float32, np.float64, np.longdouble, np.array)
    ],
    *[
        (kind(1), kind(0))
        for kind in (int, np.int8, np.int32, np.uint64, bool, np.bool_)
    ],
]


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(("number", "other"), NUMBERS, ids=repr)
def test_numbers_are_compared_whatever_their_type(naive, number, other):
    def make(mine):
        actual = SGD(mine)
        return create_multi_node_optimizer(actual, naive).setup(Model(0))

    if naive.rank:
        mine = number
    else:
        mine = float(number)
    optimizer = make(mine)
    update(optimizer, 2)
    assert optimizer.t == 2
    mine = number
    if naive.rank == 1:
        mine = other
    optimizer = make(mine)
    text = f"lr of hyperparameters: {number:g} on .*; {other:g} on rank 1"
    with pytest.raises(RankMismatchError, match=text):
        update(optimizer)
    assert optimizer.t == 0


# What a rank may change later, and the error's words for what differs then.


def change_rate(optimizer):
    optimizer.lr *= 4


def change_rate_of_a_rule(optimizer):
    optimizer.target.main.W.update_rule.hyperparam.lr = 0.25


def change_rates_of_elements(optimizer):
    weights = optimizer.target.main.W
    weights.update_rule.hyperparam.lr = np.full(weights.shape, 0.25, "f")


def freeze(optimizer):
    optimizer.target.main.W.update_rule.enabled = False


LATER = [
    (change_rate, "lr of hyperparameters: (2 on .*; 0.5 on|0.5 on .*; 2 on)"),
    (change_rate_of_a_rule, "lr of hyperparameters of parameter /main/W"),
    (change_rates_of_elements, "lr of hyperparameters of parameter /main/W"),
    (freeze, "enabled of update rule of parameter /main/W"),
]


def changed_on(comm, rank, change, **how):
    optimizer = sgd(comm, Model(0), **how)
    update(optimizer, 2)
    if comm.rank == rank % comm.size:
        change(optimizer)
    return optimizer


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize(("change", "text"), LATER)
def test_what_one_rank_sets_later_is_named_as_a_setting(naive, change, text, where):
    optimizer = changed_on(naive, where, change)
    with pytest.raises(RankMismatchError, match=text) as raised:
        update(optimizer, 3)
    assert "value of parameter" not in str(raised.value)
    assert "synchronize()" in str(raised.value)
    optimizer.synchronize()  # the remedy that is named
    update(optimizer, 3)
    assert same_everywhere(naive, optimizer.target)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(("change", "text"), LATER)
def test_it_is_repaired_once_where_that_was_asked_for(naive, change, text):
    optimizer = changed_on(naive, -1, change, on_drift="synchronize")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        update(optimizer, 6)
    assert naive.allgather_obj(len(told)) == [1] + [0] * (naive.size - 1)
    assert not told or re.search(text, str(told[0].message))
    rules = [param.update_rule for param in optimizer.target.params()]
    own = [(np.ravel(it.hyperparam.lr).tolist(), it.enabled) for it in rules]
    settings = naive.allgather_obj(own)
    assert settings.count(settings[0]) == naive.size


@pytest.mark.parametrize("kind", [Adam, MSVAG])
def test_what_is_frozen_on_one_rank_is_named_before_its_effects(naive, kind):
    actual = kind()
    optimizer = create_multi_node_optimizer(actual, naive).setup(Model(0))
    update(optimizer, 2)
    if naive.rank == 0:
        freeze(optimizer)
    with pytest.raises(
        RankMismatchError, match="disagree on enabled of update rule of parameter"
    ):
        update(optimizer, 9)


ARGUMENTS = {
    "communicator": None,
    "zero_fill": False,
    "double_buffering": True,
    "accumulate_steps": 2,
    "overlap": True,
    "on_drift": "ignore",
    "compression": "float16",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_can_not_be_set_afterwards(naive, name):
    optimizer = sgd(naive, Model(0))
    before = dict(vars(optimizer.actual_optimizer))
    with pytest.raises(
        AttributeError, match=f"'{name}' is an argument of create_multi"
    ):
        setattr(optimizer, name, ARGUMENTS[name])
    assert vars(optimizer.actual_optimizer) == before
    assert optimizer.zero_fill is True
    assert optimizer.communicator is naive
