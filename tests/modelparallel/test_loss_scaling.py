"""With `share_loss_scale` all ranks of a model have one loss scale, and skip the same steps."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from typing import Any, NamedTuple

import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Link, Parameter, Sequential, using_config
from chainer.optimizers import SGD
from numpy.testing import assert_allclose

from chainermn_comm import PeerError, RankMismatchError
from chainermn_modelparallel import (
    ColumnParallelLinear,
    MultiNodeChainList,
    share_loss_scale,
)
from chainermn_train import create_multi_node_optimizer
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


class Scale(Link):
    """Multiplies by its parameters."""

    def __init__(self, value):
        super().__init__()
        with self.init_scope():
            self.w = Parameter(np.full(3, value, np.float16))

    def forward(self, x):
        return x * F.broadcast_to(self.w, x.shape)


class Case(NamedTuple):
    """This rank's part of a model, and the same model in one process."""

    optimizer: Any
    lossfun: Any
    whole: Any
    lossfun_of_whole: Any
    # Of the parameter array of `whole` that this rank's one parameter is equal to.
    part: Any


def loss_of(y):
    # a delegate variable has no data
    if y.size:
        return F.sum(y)
    return y


def placed(comm, copies=1, wrapped=False):
    """One component a rank; the last one's gradients are 64 times larger than the others'.

    Each of the `copies` trains on the same batches.
    """
    parts = comm.size // copies
    here = comm.rank % parts
    links = [Scale(1) for _ in range(parts - 1)] + [Scale(1 / 64)]
    model = MultiNodeChainList(comm.split(comm.rank // parts, comm.rank))
    before = None
    if here:
        before = here - 1
    after = None
    if here + 1 < parts:
        after = here + 1
    model.add_link(
        deepcopy(links[here]),
        before,
        after,
    )
    optimizer = SGD(LR)
    if wrapped:
        optimizer = create_multi_node_optimizer(optimizer, comm.split(here, comm.rank))
    whole = Sequential(*links)
    x = np.full((2, 3), 64, np.float16)
    return Case(
        optimizer.setup(model),
        lambda: loss_of(model(x)),
        whole,
        lambda: F.sum(whole(x)),
        lambda: links[here].w.array,
    )


def split(comm):
    """One matrix, whose last rank has the largest gradients."""
    x = np.ones((2, 4), np.float16)
    weights = np.ones((2, 2 * comm.size), np.float16)
    weights[:, -1] = 1000
    np.random.seed(1)
    model = ColumnParallelLinear(4, 2 * comm.size, comm, nobias=True)
    np.random.seed(1)
    whole = L.Linear(4, 2 * comm.size, nobias=True)
    rows = slice(2 * comm.rank, 2 * comm.rank + 2)

    def own_loss():
        return F.sum(model(x) * weights)

    def whole_loss():
        return F.sum(whole(x) * weights)

    return Case(
        SGD(LR).setup(model),
        own_loss,
        whole,
        whole_loss,
        lambda: whole.W.array[rows],
    )


CASES = {
    "placed": placed,
    "placed, wrapped": lambda comm: placed(comm, wrapped=True),
    "placed, in two replicas": lambda comm: placed(comm, copies=2, wrapped=True),
    "split": split,
}
FOUR_RANKS = [pytest.mark.sizes(4), pytest.mark.ranks(4)]


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=FOUR_RANKS if "two" in k else ()) for k in CASES]
)
def test_updates_are_those_of_one_process(comm, kind):
    """Also where the gradients of one rank alone overflow."""
    optimizer, lossfun, whole, lossfun_of_whole, part = CASES[kind](comm)
    alone = SGD(LR).setup(whole)
    alone.loss_scaling(INTERVAL)
    optimizer.loss_scaling(INTERVAL + comm.rank)  # rank 0's is for all
    share_loss_scale(optimizer, comm)
    seen = []
    expected = []
    for _ in range(UPDATES):
        for each, rows, loss in (
            (optimizer, seen, lossfun),
            (alone, expected, lossfun_of_whole),
        ):
            each.update(loss)
            rows.append((each.t, each._loss_scale, each.is_safe_to_update()))
    assert comm.allgather_obj(seen) == [expected] * comm.size
    (param,) = optimizer.target.params()
    assert_allclose(param.array, part(), rtol=1e-3)
    assert 2 <= sum(not is_safe for *_, is_safe in seen) < UPDATES // 2


@WITH_THIRD_PARTY
def test_all_ranks_get_rank_0s_scale(comm):
    case = placed(comm)
    case.optimizer.loss_scaling()
    share_loss_scale(case.optimizer, comm)
    case.optimizer.update(case.lossfun)
    if comm.rank == 0:
        case.optimizer.loss_scaling()  # back to 1, as after a resume of this rank alone
    before = case.optimizer.t
    with pytest.raises(
        RankMismatchError, match=r"call share_loss_scale again.*: 1\.0 on rank 0; "
    ):
        case.optimizer.update(case.lossfun)
    assert case.optimizer.t == before
    share_loss_scale(case.optimizer, comm)
    assert comm.allgather_obj(case.optimizer._loss_scale) == [1.0] * comm.size
    case.optimizer.update(case.lossfun)
    assert comm.allgather_obj(case.optimizer._loss_scale) == [2.0] * comm.size


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_hook_that_fails_on_one_rank_leaves_ranks_in_step(comm, wrapped):
    """Also one that was there before: whatever it raises, ranks meet in the same updates."""
    case = placed(comm, wrapped=wrapped)
    failures = [comm.rank == 0]

    def fail_once(_):
        if failures and failures.pop():
            raise ArithmeticError("planned")

    case.optimizer.add_hook(fail_once)
    case.optimizer.loss_scaling(INTERVAL)
    share_loss_scale(case.optimizer, comm)
    if comm.rank == 0:
        expected = pytest.raises(ArithmeticError)
    else:
        expected = nullcontext()
    with expected:
        case.optimizer.update(case.lossfun)
    assert comm.allgather_obj("here") == ["here"] * comm.size
    if wrapped:
        case.optimizer.synchronize()
    share_loss_scale(case.optimizer, comm)
    case.optimizer.update(case.lossfun)
    assert len(set(comm.allgather_obj(case.optimizer._loss_scale))) == 1


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("in_a_chain", [False, True])
def test_a_chain_list_refuses_scales_of_each_rank(comm, wrapped, in_a_chain):
    """Before it communicates, so on each rank that adapts its own."""
    case = placed(comm, wrapped=wrapped)
    optimizer = case.optimizer
    model = case.optimizer.target
    if in_a_chain:
        optimizer.setup(Sequential(model, loss_of))
    optimizer.set_loss_scale(8.0)  # which stays as it is
    optimizer.update(case.lossfun)
    optimizer.loss_scaling()
    text = rf"rank {comm.rank}: .*share_loss_scale\(optimizer, communicator\)"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=text):
            optimizer.update(case.lossfun)
        if wrapped:
            optimizer.synchronize()  # all ranks of the model have skipped the update
    case.lossfun().backward()  # not in an update
    share_loss_scale(optimizer, comm)
    optimizer.update(case.lossfun)
    assert optimizer.t == 2


def test_parallel_links_name_the_remedy_where_scales_part(comm):
    """As soon as the gradients of one rank alone have overflowed."""
    case = split(comm)
    case.optimizer.loss_scaling(INTERVAL)
    text = r"ColumnParallelLinear.* number of steps .*chainermn\.share_loss_scale"
    with pytest.raises(RankMismatchError, match=text):
        update_often(case)


def update_often(case):
    for _ in range(UPDATES):
        case.optimizer.update(case.lossfun)


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
    optimizer, lossfun, *_ = placed(comm, wrapped=True)
    last = comm.size - 1
    if comm.rank == last:
        spoil(optimizer)
    else:
        optimizer.loss_scaling()
    raised = PeerError
    if comm.rank == last:
        raised = error
    with pytest.raises(raised, match=text) as caught:
        share_loss_scale(optimizer, comm)
    assert f"rank {last}: " in str(caught.value)
    if comm.rank != last:  # it has no hook that would wait for the last rank
        with pytest.raises(RuntimeError, match="share_loss_scale"):
            optimizer.update(lossfun)
