"""Ranks with different optimizers, or that have made different numbers of updates, are told so."""

from __future__ import annotations

import re

import chainer
import pytest

from chainermn_comm import RankMismatchError
from chainermn_train import create_multi_node_optimizer
from tests.support.linear import Model, X, sgd

pytestmark = pytest.mark.world


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("name", "values", "lazy"),
    [
        ("double_buffering", (False, True), False),
        ("zero_fill", (True, False), True),
        ("accumulate_steps", (1, 2), False),
        ("accumulate_steps", (3, 2), True),
        *(
            pytest.param(name, values, lazy, marks=pytest.mark.full)
            for name, values, lazy in [
                ("double_buffering", (False, True), True),
                ("zero_fill", (True, False), False),
                *(("accumulate_steps", values, False) for values in [(2, 1), (3, 2), (2, 5)]),
                *(("accumulate_steps", values, True) for values in [(1, 2), (2, 1), (2, 5)]),
            ]
        ),
    ],
)
def test_settings_that_differ_are_named_at_the_first_update(comm, name, values, lazy):
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
    ("steps", "updates", "double_buffering"),
    [
        (3, (6, 4), False),
        (3, (2, 4), True),
        (2, (4, 5), False),
        (1, (1, 2), True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                (3, (6, 4), True),
                (3, (2, 4), False),
                (2, (4, 5), True),
                (1, (1, 2), False),
            ]
        ),
    ],
)
def test_ranks_out_of_step_at_a_flush_are_told_why(comm, steps, updates, double_buffering):
    model = Model(0)
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
