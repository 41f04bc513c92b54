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

from chainermn_comm import PeerError, RankMismatchError
from chainermn_modelparallel import MultiNodeBatchNormalization
from chainermn_train import create_multi_node_optimizer
from tests.support.training.exchanges import HIERARCHICAL, KINDS, exchanging, states
from tests.support.training.trainers import load_state, state_of

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
@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.filterwarnings("ignore:Non finite number found in param.grad")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_hook_fails_on_a_rank_beside_a_loss_that_communicates(
    comm, kind, timing, overflows
):
    """The others are in batch normalization then, in the next update, and know no new scale."""
    model = Net(comm.rank, MultiNodeBatchNormalization(4, comm))
    optimizer = exchanging(kind, comm, chainer.optimizers.MomentumSGD(), model)
    if overflows:
        optimizer.loss_scaling(interval=1)
    planned = []

    def fail(_):
        if planned:
            raise PlantedError(planned.pop())

    optimizer.add_hook(fail, "fail", timing=timing)
    update(optimizer, comm.rank, 3)
    loss = lambda: model(batch(comm.rank, 0)) * (np.inf if overflows else 1)  # noqa: E731
    for _ in range(KINDS[kind].delay):  # the step is along the update's before
        optimizer.update(loss)
    planned += ["planted"] * (comm.rank == 1)
    with pytest.raises(PlantedError) if comm.rank == 1 else contextlib.nullcontext():
        optimizer.update(loss)
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


@of_each_kind
def test_a_thread_that_cannot_be_started_makes_no_difference(comm, kind):
    """Others have agreed to send then, and do."""
    ends, none_left = [], RuntimeError("can't start new thread")
    for can_start in True, False:
        optimizer = exchanging(kind, comm, chainer.optimizers.SGD(0.1), Net(0))
        update(optimizer, comm.rank, 3)
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == 1 and not can_start:
                patch.setattr(
                    threading.Thread, "start", mock.Mock(side_effect=none_left)
                )
            update(optimizer, comm.rank, 2)
        optimizer.flush()
        ends.append(states(optimizer))
        assert_trains_on(comm, optimizer)
    assert ends[0] == ends[1]


def other(comm, optimizer, kind, steps=1):
    """An optimizer of the same kind that has loaded what another one saves."""
    twin = exchanging(kind, comm, chainer.optimizers.SGD(0.1), Net(9), steps)
    for one, it in (optimizer.target, twin.target), (optimizer, twin):
        load_state(it, state_of(one))
    return twin


@of_each_kind
@pytest.mark.parametrize("steps", [1, 2])
def test_ranks_that_resume_from_different_moments_have_rank_0s_state(comm, kind, steps):
    """With its gradients in flight, and its loss scale for those of a group."""
    optimizer = exchanging(
        kind, comm, chainer.optimizers.SGD(0.1), Net(comm.rank), steps
    )
    optimizer.loss_scaling(interval=1)
    update(optimizer, comm.rank, 4 * steps + (steps > 1))
    twins = [other(comm, optimizer, kind, steps)]
    update(optimizer, comm.rank, 2 * steps)
    twins.append(other(comm, optimizer, kind, steps))
    twin = other(comm, twins[comm.rank > 0], kind, steps)
    twin.loss_scaling(interval=1)
    load_state(twin, state_of(twin))
    update(twin, comm.rank, 2 * steps)
    assert_alike(comm, twin)
    twin.flush()
    assert_alike(comm, twin)
    assert_trains_on(comm, twin)


@of_each_kind
@pytest.mark.parametrize("scaling", ["static", "dynamic"])
def test_a_scale_that_a_loss_changes_on_one_rank_is_named(comm, kind, scaling):
    arguments = {**KINDS[kind].arguments, "on_drift": "ignore"}
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm, **arguments
    )
    optimizer.setup(Net(comm.rank))
    optimizer.set_loss_scale(8.0) if scaling == "static" else optimizer.loss_scaling()
    update(optimizer, comm.rank, 4)

    def loss():
        if comm.rank == 1:
            optimizer.set_loss_scale(64.0)
        return optimizer.target(batch(comm.rank, 0))

    with pytest.raises(RankMismatchError, match="loss scal"):
        optimizer.update(loss)
    optimizer.finalize()


@pytest.mark.parametrize("steps", [2, 3])
@of_each_kind
def test_adding_up_fails_on_a_rank(comm, kind, steps):
    """All begin anew then."""
    optimizer = exchanging(
        kind, comm, chainer.optimizers.SGD(0.1), Net(comm.rank), steps
    )
    update(optimizer, comm.rank, 2 * steps + steps - 2)
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(chainer.Parameter, "grad", Unreadable())
        with pytest.raises(MemoryError) if comm.rank == 1 else contextlib.nullcontext():
            optimizer.update()
    update(optimizer, comm.rank, 2 * steps + 1)
    assert_alike(comm, optimizer)
    assert_trains_on(comm, optimizer)


class Unreadable:
    """Raises where it is read once more than the agreement needs."""

    def __get__(self, *_):
        raise MemoryError


@of_each_kind
@pytest.mark.parametrize("how", ["setup", "load"])
def test_a_rank_begins_anew_within_a_group(comm, kind, how):
    """The others' next update is collective, too."""
    optimizer = exchanging(kind, comm, chainer.optimizers.SGD(0.1), Net(comm.rank), 2)
    update(optimizer, comm.rank, 4)
    state = state_of(optimizer)
    update(optimizer, comm.rank, 1)
    if comm.rank == 1:
        optimizer.setup(Net(5)) if how == "setup" else load_state(optimizer, state)
    update(optimizer, comm.rank, 4)
    optimizer.flush()
    assert_alike(comm, optimizer)
    assert_trains_on(comm, optimizer)


class Failing(Net):
    """Normalized over all ranks; its loss fails where it is asked to."""

    place = None

    def __call__(self, x):
        if self.place == "before":
            raise PlantedError
        loss = super().__call__(x)
        if self.place == "after":
            raise PlantedError
        return loss


@of_each_kind
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_loss_that_communicates_fails_on_a_rank(comm, kind, place, who):
    """The others are in its batch normalization, or in that one's backward: they raise there."""
    model = Failing(comm.rank, MultiNodeBatchNormalization(4, comm))
    optimizer = exchanging(kind, comm, chainer.optimizers.SGD(0.1), model)
    update(optimizer, comm.rank, 4)
    for _ in range(2):
        model.place = place if comm.rank == who else None
        with pytest.raises(PlantedError if comm.rank == who else PeerError):
            update(optimizer, comm.rank)
    model.place = None
    assert_trains_on(comm, optimizer)


def test_means_that_do_not_fit_fail_on_a_rank(comm):
    """Ranks have agreed by then: the next exchange begins on all."""
    kind = "double buffering"
    optimizer = exchanging(kind, comm, chainer.optimizers.SGD(0.1), Net(comm.rank))
    update(optimizer, comm.rank, 4)
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            getter = chainer.Variable.grad.fget
            failing = property(getter, mock.Mock(side_effect=MemoryError))
            patch.setattr(chainer.Parameter, "grad", failing)
        with pytest.raises(MemoryError) if comm.rank == 1 else contextlib.nullcontext():
            update(optimizer, comm.rank)
    update(optimizer, comm.rank, 2)
    assert_alike(comm, optimizer)
    assert_trains_on(comm, optimizer)
