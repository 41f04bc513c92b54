"""Ranks with different optimizers, or that have made different numbers of updates, are told so."""

from __future__ import annotations

import re

import chainer
import pytest

from chainermn_comm import RankMismatchError
from chainermn_train import create_multi_node_optimizer
from tests.support.linear import Model, X, sgd
from tests.support.pairwise import tiered

pytestmark = pytest.mark.world

# A setting, its value on all ranks but rank 1, and there.
SETTINGS = [
    ("double_buffering", False, True),
    ("zero_fill", True, False),
    *(("accumulate_steps", *values) for values in [(1, 2), (3, 2), (2, 1), (2, 5)]),
]
# Updates of a step, those of all ranks but rank 1, and its own.
UPDATES = [(3, 6, 4), (3, 2, 4), (2, 4, 5), (1, 1, 2)]


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("setting", "lazy"),
    tiered([(setting, number % 2) for number, setting in enumerate(SETTINGS)], SETTINGS, [0, 1]),
)
def test_settings_that_differ_are_named_at_the_first_update(comm, setting, lazy):
    name, *values = setting
    mine = values[comm.rank == 1]
    model = Model(0, None if lazy else 3)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm, **{name: mine})
    optimizer.setup(model)
    text = f"the same {name} on all ranks, not {values[0]} on rank 0, {values[1]} on rank 1"
    for _ in range(2):  # nothing has been agreed on by the first
        with pytest.raises(RankMismatchError, match=text):
            optimizer.update(model, X)
    assert optimizer.t == 0
    assert comm.allreduce_obj(1) == comm.size
    optimizer.finalize()


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            chainer.optimizers.MomentumSGD(0.5),
            "same optimizer .* SGD on rank 0, MomentumSGD",
        ),
        (chainer.optimizers.SGD(0.25), "hyperparameters .* lr=0.5 on rank 0, lr=0.25 on rank 1"),
    ],
    ids=["class", "hyperparameters"],
)
def test_optimizers_that_differ_are_named_at_the_first_update(comm, other, text):
    model = Model(0)
    actual = other if comm.rank == 1 else chainer.optimizers.SGD(0.5)
    optimizer = create_multi_node_optimizer(actual, comm).setup(model)
    with pytest.raises(RankMismatchError, match=text):
        optimizer.update(model, X)
    assert comm.allreduce_obj(1) == comm.size


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("updates", "double_buffering"),
    tiered([(updates, number % 2) for number, updates in enumerate(UPDATES)], UPDATES, [0, 1]),
)
def test_ranks_out_of_step_at_a_flush_are_told_why(comm, updates, double_buffering):
    model = Model(0)
    steps, *updates = updates
    optimizer = sgd(comm, model, accumulate_steps=steps, double_buffering=double_buffering)
    mine = updates[comm.rank == 1]
    more = mine == max(updates)

    def call():
        for _ in range(mine):
            optimizer.update(model, X)
        optimizer.flush()

    text = rf"^rank {comm.rank}: some ranks call flush.* rank {int(updates[0] > updates[1])} calls"
    with pytest.raises(RankMismatchError, match=text) as raised:
        call()
    found = re.findall(r"rank (\d+) calls (\w+)\(\) after (\d+) of the (\d+)", str(raised.value))
    assert [method for _, method, *_ in found].count("flush") in (1, comm.size - 1)
    assert (found[comm.rank][1] == "update") == more
    assert {of for *_, of in found} == {str(steps)}
    assert comm.allreduce_obj(1) == comm.size
    optimizer.finalize()
