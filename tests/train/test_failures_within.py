"""Whatever fails within an update, on one rank: nobody waits, and all train on alike."""

from __future__ import annotations

import contextlib
import threading
import warnings
from unittest import mock

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from chainermn_comm import PeerError
from chainermn_modelparallel import MultiNodeBatchNormalization
from chainermn_train import create_multi_node_optimizer
from tests.support.exchanges import HIERARCHICAL, KINDS, exchanging, states
from tests.support.training import load_state, state_of

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4), HIERARCHICAL]

of_each_kind = pytest.mark.parametrize("kind", KINDS)


class PlantedError(Exception):
    """What fails as it should."""


class Net(chainer.Chain):
    def __init__(self, seed, normalization=None):
        super().__init__()
        np.random.seed(seed)
        with self.init_scope():
            self.first, self.last = L.Linear(4, 4), L.Linear(4, 2)
            self.normalization = normalization

    def __call__(self, x):
        h = self.first(x)
        if self.normalization is not None:
            h = self.normalization(h)
        return F.mean(self.last(F.tanh(h)) ** 2)


def batch(rank, number):
    return np.random.RandomState((rank, number)).uniform(-1, 1, (3, 4)).astype("f")


def update(optimizer, rank, count=1):
    for number in range(count):
        optimizer.update(optimizer.target, batch(rank, number))


def assert_alike(comm, optimizer):
    everywhere = comm.allgather_obj(states(optimizer))
    assert everywhere == [everywhere[0]] * comm.size


def assert_trains_on(comm, optimizer):
    t = optimizer.t
    update(optimizer, comm.rank, 4)
    optimizer.flush()
    assert optimizer.t > t
    assert_alike(comm, optimizer)
    optimizer.finalize()


@contextlib.contextmanager
def raised(fails, kind=PlantedError):
    with pytest.raises(kind if fails else PeerError):
        yield


@of_each_kind
@pytest.mark.parametrize("timing", ["pre", "post"])
def test_a_hook_fails_on_a_rank_beside_a_loss_that_communicates(comm, kind, timing):
    """The others are in batch normalization then, in the next update."""
    model = Net(comm.rank, MultiNodeBatchNormalization(4, comm))
    optimizer = exchanging(kind, comm, chainer.optimizers.MomentumSGD(), model)
    planned = []

    def fail(_):
        if planned:
            raise PlantedError(planned.pop())

    optimizer.add_hook(fail, "fail", timing=timing)
    update(optimizer, comm.rank, 3)
    planned += ["planted"] * (comm.rank == 1)
    with pytest.raises(PlantedError) if comm.rank == 1 else contextlib.nullcontext():
        update(optimizer, comm.rank)
    update(optimizer, comm.rank)
    assert_alike(comm, optimizer)
    assert_trains_on(comm, optimizer)


@of_each_kind
def test_warnings_that_are_errors_end_a_repair_of_drift_on_all_ranks(comm, kind):
    arguments = {**KINDS[kind].arguments, "on_drift": "synchronize"}
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm, **arguments)
    optimizer.setup(Net(comm.rank))
    update(optimizer, comm.rank, 3)
    optimizer.t += comm.rank
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with raised(comm.rank == 0, RuntimeWarning):
            update(optimizer, comm.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        update(optimizer, comm.rank)
    assert_alike(comm, optimizer)
    assert_trains_on(comm, optimizer)


@of_each_kind
def test_a_snapshot_that_one_rank_cannot_load_leaves_rank_0s_state_to_all(comm, kind):
    optimizer = exchanging(kind, comm, chainer.optimizers.Adam(), Net(comm.rank))
    update(optimizer, comm.rank, 3)
    state = state_of(optimizer)
    update(optimizer, comm.rank, 2)
    if comm.rank == 1:
        del state["last/W/v"]
        with pytest.raises(KeyError):
            load_state(optimizer, state)
    else:
        load_state(optimizer, state)
    update(optimizer, comm.rank)
    assert_alike(comm, optimizer)
    assert_trains_on(comm, optimizer)


@of_each_kind
def test_scales_that_an_earlier_backward_left_are_undone(comm, kind):
    """On one rank, of a backward of the user's own; steps are those without it."""
    ends = []
    for scale in None, 64.0:
        optimizer = exchanging(kind, comm, chainer.optimizers.SGD(0.1), Net(0))
        update(optimizer, comm.rank, 2)
        optimizer.target.cleargrads()
        loss = optimizer.target(batch(comm.rank, 7))
        loss.backward(loss_scale=scale if comm.rank == 1 else None)
        optimizer.update()
        update(optimizer, comm.rank, 2)
        optimizer.flush()
        assert_alike(comm, optimizer)
        ends.append(states(optimizer))
        optimizer.finalize()
    assert ends[0] == ends[1]


class Counting:
    """An optimizer that counts nothing, and knows no loss scale."""

    target = None

    def setup(self, link):
        self.target = link
        return self

    def update(self, lossfun=None, *args, **kwds):
        for param in self.target.params():
            param.array -= 0.1 * param.grad


@of_each_kind
def test_an_optimizer_of_the_users_needs_no_count_of_steps(comm, kind):
    optimizer = exchanging(kind, comm, Counting(), Net(comm.rank))
    update(optimizer, comm.rank, 5)
    optimizer.synchronize()
    found = [param.array.tobytes() for param in optimizer.target.params()]
    assert comm.allgather_obj(found) == [found] * comm.size
    optimizer.finalize()


def test_a_thread_that_cannot_be_started_keeps_no_rank_waiting(comm):
    """Others have agreed to send then, and do."""
    optimizer = exchanging("overlap", comm, chainer.optimizers.SGD(0.1), Net(comm.rank))
    update(optimizer, comm.rank, 3)
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(threading.Thread, "start", mock.Mock(side_effect=PlantedError))
        with raised(comm.rank == 1):
            update(optimizer, comm.rank)
    assert_alike(comm, optimizer)
    assert_trains_on(comm, optimizer)
