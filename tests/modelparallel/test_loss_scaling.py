"""With `share_loss_scale` all ranks of a model have one loss scale, and skip the same steps."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from chainer import using_config
from chainer.optimizers import SGD

from chainermn_comm import RankMismatchError
from chainermn_modelparallel import share_loss_scale
from chainermn_train import create_multi_node_optimizer
from tests.support.oracles.raised import raises_on_all
from tests.support.training.over_ranks import batch, in_columns, in_one_group, placed
from tests.support.worlds.third_party import WITH_THIRD_PARTY

pytestmark = [
    pytest.mark.world,
    pytest.mark.sizes(2, 3, 4),
    pytest.mark.filterwarnings("ignore:Non finite number found"),
    pytest.mark.usefixtures("half_precision"),
]
UPDATES = 20
INTERVAL = 2
LR = 2.0**-11


@pytest.fixture
def half_precision():
    with using_config("dtype", np.float16), np.errstate(all="ignore"):
        yield


def make(comm, wrapped=False, models=placed):
    """An optimizer of a model that ranks have a part of each, and its loss."""
    place = in_one_group(comm)
    model = models(place).mine
    optimizer = SGD(LR)
    if wrapped:
        optimizer = create_multi_node_optimizer(optimizer, place.mean)
    return optimizer.setup(model), partial(model, *batch(0))


@WITH_THIRD_PARTY
def test_all_ranks_get_rank_0s_scale(comm):
    optimizer, loss = make(comm)
    optimizer.loss_scaling()
    optimizer._loss_scaling_isnan_ever = comm.rank > 0  # then the scale grows slowly
    share_loss_scale(optimizer, comm)
    optimizer.update(loss)
    if comm.rank == 0:
        optimizer.loss_scaling()  # back to 1, as after a resume of this rank alone
    before = optimizer.t
    with pytest.raises(
        RankMismatchError, match=r"call share_loss_scale again.*: 1\.0 on rank 0; "
    ):
        optimizer.update(loss)
    assert optimizer.t == before
    share_loss_scale(optimizer, comm)
    assert comm.allgather_obj(optimizer._loss_scale) == [1.0] * comm.size
    optimizer.update(loss)
    assert comm.allgather_obj(optimizer._loss_scale) == [2.0] * comm.size


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_hook_that_fails_on_one_rank_leaves_ranks_in_step(comm, wrapped):
    """Also one that was there before: whatever it raises, ranks meet in the same updates."""
    optimizer, loss = make(comm, wrapped)
    failures = [comm.rank == 0]

    def fail_once(_):
        if failures and failures.pop():
            raise ArithmeticError("planned")

    optimizer.add_hook(fail_once)
    optimizer.loss_scaling(INTERVAL)
    share_loss_scale(optimizer, comm)
    if comm.rank == 0:
        expected = pytest.raises(ArithmeticError)
    else:
        expected = nullcontext()
    with expected:
        optimizer.update(loss)
    assert comm.allgather_obj("here") == ["here"] * comm.size
    if wrapped:
        optimizer.synchronize()
    share_loss_scale(optimizer, comm)
    optimizer.update(loss)
    assert len(set(comm.allgather_obj(optimizer._loss_scale))) == 1


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("in_a_chain", [False, True])
def test_a_chain_list_refuses_scales_of_each_rank(comm, wrapped, in_a_chain):
    """Before it communicates, so on each rank that adapts its own."""
    optimizer, loss = make(comm, wrapped)
    if not in_a_chain:
        optimizer.setup(optimizer.target.parts)
    optimizer.set_loss_scale(8.0)  # which stays as it is
    optimizer.update(loss)
    optimizer.loss_scaling()
    text = rf"rank {comm.rank}: .*share_loss_scale\(optimizer, communicator\)"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=text):
            optimizer.update(loss)
        if wrapped:
            optimizer.synchronize()  # all ranks of the model have skipped the update
    loss().backward()  # not in an update
    share_loss_scale(optimizer, comm)
    optimizer.update(loss)
    assert optimizer.t == 2


def test_parallel_links_name_the_remedy_where_scales_part(comm):
    """As soon as the gradients of one rank alone have overflowed."""
    optimizer, loss = make(comm, models=in_columns)
    optimizer.loss_scaling(INTERVAL)
    text = r"ColumnParallelLinear.* number of steps .*chainermn\.share_loss_scale"
    with pytest.raises(RankMismatchError, match=text):
        update_often(optimizer, loss)


def update_often(optimizer, loss):
    for _ in range(UPDATES):
        optimizer.update(loss)


def not_dynamic(optimizer):
    optimizer.set_loss_scale(8.0)


def not_set_up(optimizer):
    optimizer.actual_optimizer = SGD()
    optimizer.loss_scaling()


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (not_dynamic, ValueError, r"call its loss_scaling\(\) first"),
        (not_set_up, RuntimeError, r"call its setup\(model\) first"),
    ],
)
def test_errors_of_one_rank_are_raised_on_all(comm, spoil, error, text):
    optimizer, loss = make(comm, wrapped=True)
    last = comm.size - 1
    if comm.rank == last:
        spoil(optimizer)
    else:
        optimizer.loss_scaling()
    with raises_on_all(comm.rank == last, error, text) as caught:
        share_loss_scale(optimizer, comm)
    assert f"rank {last}: " in str(caught.value)
    if comm.rank != last:  # it has no hook that would wait for the last rank
        with pytest.raises(RuntimeError, match="share_loss_scale"):
            optimizer.update(loss)
