"""What holds for all that is given to a trainer and communicates."""

from __future__ import annotations

import copy
import pickle

import pytest
from chainer.iterators import SerialIterator

from chainermn_train import extensions
from tests.support.linear import ScaledMean

pytestmark = pytest.mark.world

MAKE = {
    "AllreducePersistent": lambda comm: extensions.AllreducePersistent(ScaledMean(), comm),
    "GenericMultiNodeEvaluator": lambda comm: extensions.GenericMultiNodeEvaluator(
        comm, SerialIterator([], 1, repeat=False), ScaledMean()
    ),
    "MultiNodeEarlyStoppingTrigger": lambda comm: extensions.MultiNodeEarlyStoppingTrigger(comm),
    "ObservationAggregator": lambda comm: extensions.ObservationAggregator(comm, "x"),
    "ThroughputReport": lambda comm: extensions.ThroughputReport(comm),
    "on_rank": lambda comm: extensions.on_rank(lambda trainer: None, comm),
}


@pytest.mark.parametrize("name", sorted(set(MAKE) - {"on_rank"}))
def test_a_copy_has_the_same_communicator(naive, name):
    made = MAKE[name](naive)
    for twin in copy.copy(made), copy.deepcopy(made):
        assert type(twin) is type(made)
        assert twin is not made
        assert twin.comm is naive
    with pytest.raises(TypeError, match=f"{name} can't be pickled"):
        pickle.dumps(made)


@pytest.mark.parametrize("name", MAKE)
def test_what_is_no_communicator_is_named(name):
    with pytest.raises(TypeError, match=rf"{name} needs a communicator.*not tuple"):
        MAKE[name]((1, "epoch"))
