"""What holds for all that is given to a trainer and communicates."""

from __future__ import annotations

import pickle
from copy import copy, deepcopy

import pytest
from chainer.iterators import SerialIterator
from chainer.optimizers import SGD
from chainer.training.extensions import Evaluator

from chainermn_train import (
    create_multi_node_evaluator,
    create_multi_node_iterator,
    create_multi_node_optimizer,
    create_synchronized_iterator,
    extensions,
)
from tests.support.training.small_models import ScaledMean

pytestmark = pytest.mark.world


def make_create_multi_node_iterator(comm):
    return create_multi_node_iterator(SerialIterator([1], 1), comm)


def make_create_synchronized_iterator(comm):
    return create_synchronized_iterator(SerialIterator([1], 1), comm)


def make_create_multi_node_evaluator(comm):
    return create_multi_node_evaluator(
        Evaluator(SerialIterator([], 1, repeat=False), ScaledMean()), comm
    )


def make_genericmultinodeevaluator(comm):
    return extensions.GenericMultiNodeEvaluator(
        comm, SerialIterator([], 1, repeat=False), ScaledMean()
    )


def make_on_rank(comm):
    return extensions.on_rank(lambda trainer: None, comm)


MAKE = {
    "create_multi_node_iterator": make_create_multi_node_iterator,
    "create_synchronized_iterator": make_create_synchronized_iterator,
    "create_multi_node_evaluator": make_create_multi_node_evaluator,
    "create_multi_node_optimizer": lambda comm: create_multi_node_optimizer(
        SGD(), comm
    ),
    "AllreducePersistent": lambda comm: extensions.AllreducePersistent(
        ScaledMean(), comm
    ),
    "GenericMultiNodeEvaluator": make_genericmultinodeevaluator,
    "MultiNodeEarlyStoppingTrigger": lambda comm: (
        extensions.MultiNodeEarlyStoppingTrigger(comm)
    ),
    "ObservationAggregator": lambda comm: extensions.ObservationAggregator(comm, "x"),
    "ThroughputReport": lambda comm: extensions.ThroughputReport(comm),
    "on_rank": make_on_rank,
}


@pytest.mark.parametrize("name", sorted(set(MAKE) - {"on_rank"}))
def test_a_copy_has_the_same_communicator(naive, name):
    made = MAKE[name](naive)
    for twin in copy(made), deepcopy(made):
        assert type(twin) is type(made)
        assert twin is not made
        assert any(value is naive for value in vars(twin).values())
    text = r"can't be pickled.*chainer\.serializers"
    with pytest.raises(TypeError, match=text):
        pickle.dumps(made)


@pytest.mark.parametrize("name", MAKE)
def test_what_is_no_communicator_is_named(name):
    text = f"{name} needs a communicator made by create_communicator.*not tuple"
    with pytest.raises(TypeError, match=text):
        MAKE[name]((1, "epoch"))
