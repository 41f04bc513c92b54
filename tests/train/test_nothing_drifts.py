"""Ranks that changed something while gradients were on their way don't drift apart unnoticed."""

from __future__ import annotations

import contextlib

import chainer
import numpy as np
import pytest

from chainermn_comm import RankMismatchError
from tests.support.plugins.pairwise import pairwise
from tests.support.training.exchanges import HIERARCHICAL, KINDS, exchanging, states
from tests.support.training.trainers import load_state, parameters, state_of
from tests.train.optimizer_machine.commands import OPTIMIZERS, Part, PlantedError, Tiny

pytestmark = [
    pytest.mark.world,
    pytest.mark.sizes(2, 3, 4),
    HIERARCHICAL,
    # NumPy and Chainer, of gradients that aren't finite.
    pytest.mark.filterwarnings("ignore:Non finite number found in param.grad"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

SEED = 5
CHANGES = {
    "added by all": ("third", None),
    "replaced by rank 0": ("second", 0),
    "replaced by the last rank": ("second", -1),
    "replaced by all": ("second", None),
}
RANKS = {"rank 0": 0, "the last rank": -1, "all ranks": None}


def tiny(*seed):
    return Tiny(
        {name: (*seed, place) for place, name in enumerate(["first", "second"])}
    )


def batch(rank, number):
    return np.random.RandomState((rank, number)).uniform(-1, 1, 2).astype("f")


def replace_link(optimizer, name, *seed):
    model = optimizer.target
    if hasattr(model, name):
        delattr(model, name)
    model.add_link(name, Part(*seed))
    for param in model[name].params():
        param.update_rule = optimizer.create_update_rule()


class Job:
    """All ranks train a tiny model; those that are named in `who` do something else."""

    def __init__(self, comm, kind, steps=1, optimizer="Adam", model=None):
        self.comm, self.kind, self.steps, self.number = comm, kind, steps, 0
        model = tiny(SEED, comm.rank) if model is None else model
        self.optimizer = exchanging(kind, comm, OPTIMIZERS[optimizer](), model, steps)

    @property
    def model(self):
        return self.optimizer.target

    def is_among(self, who):
        return who is None or self.comm.rank == who % self.comm.size

    def update(self, count=1, unused=(), factor=1):
        """Ranks don't use the second link if they are among `unused`."""
        for _ in range(count):
            self.number += 1
            self.optimizer.update(
                self.loss, batch(self.comm.rank, self.number), unused, factor
            )

    def loss(self, x, unused, factor):
        leaves_out = unused is None or (unused != () and self.is_among(unused))
        return self.model(x, "second" if leaves_out else "") * factor

    def everywhere(self):
        """The states of all ranks."""
        scale = self.optimizer._loss_scale
        told = repr(scale and float(scale)).encode()
        return self.comm.allgather_obj({**states(self.optimizer), "loss scale": told})

    def assert_alike(self):
        found = self.everywhere()
        for rank, state in enumerate(found):
            wrong = [key for key in state if state[key] != found[0].get(key)]
            assert not wrong, f"rank {rank} differs from rank 0 in {wrong}"
        return found[0]

    def assert_trains_on(self):
        """From the beginning of a group, with nothing in flight."""
        for _ in range(3):
            t, before = self.optimizer.t, self.assert_alike()
            self.update(self.steps)
            self.optimizer.flush()
            after = self.assert_alike()
            assert self.optimizer.t == t + 1
            moved = {
                key
                for key in after
                if key.startswith("/") and after[key] != before[key]
            }
            assert moved == {name for name, _ in self.model.namedparams()}
        self.optimizer.finalize()


# Loss scales, and gradients that a rank doesn't have.


@pairwise(kind=KINDS, steps=[2, 3], lacking=[0, -1], unused=["in this group", "ever"])
def test_a_flush_undoes_the_dynamic_scale_where_a_rank_has_no_gradient(
    comm, kind, steps, lacking, unused
):
    """The step along what is in flight changes the scale first, with double buffering."""
    job = Job(comm, kind, steps)
    job.optimizer.loss_scaling(interval=1)
    job.update(2 * steps, unused=lacking if unused == "ever" else ())
    job.update(unused=lacking)
    t = job.optimizer.t
    job.optimizer.flush()
    assert job.optimizer.t == t + 1 + KINDS[kind].delay
    job.assert_alike()
    job.assert_trains_on()


@pairwise(kind=KINDS, steps=[2, 3], lacking=[0, -1], scale=[None, 8.0, 0.5])
def test_a_scale_that_is_set_within_a_group_is_undone_where_a_rank_has_no_gradient(
    comm, kind, steps, lacking, scale
):
    """Steps are those of training without a scale."""
    ends = []
    for scales in (None, None), (scale, 256.0):
        job = Job(comm, kind, steps, "SGD")
        for count, each in zip((1, 2 * steps - 1), scales, strict=True):
            if each is not None:
                job.optimizer.set_loss_scale(each)
            job.update(count, unused=lacking)
        job.optimizer.flush()
        assert job.optimizer.t == 2
        job.assert_alike()
        ends.append(parameters(job.model))
        job.assert_trains_on()
    for name, array in ends[0].items():
        np.testing.assert_allclose(
            ends[1][name], array, rtol=1e-5, atol=1e-6, err_msg=name
        )


# Links that change.


@pairwise(kind=KINDS, optimizer=OPTIMIZERS, change=CHANGES, steps=[1, 3])
def test_a_flush_after_a_link_has_changed_gives_rank_0s_state_to_all(
    comm, kind, optimizer, change, steps
):
    """What was accumulated or in flight is dropped."""
    name, who = CHANGES[change]
    job = Job(comm, kind, steps, optimizer)
    job.update(3 * steps + steps // 2)
    if job.is_among(who):
        replace_link(job.optimizer, name, 1, comm.rank)
    found = job.everywhere()
    assert found != found[:1] * comm.size
    job.optimizer.flush()
    assert job.assert_alike() == found[0]
    job.assert_trains_on()


@pairwise(kind=KINDS, adding=[0, -1], steps=[1, 3])
def test_a_link_that_one_rank_adds_first_is_named_until_the_others_follow(
    comm, kind, adding, steps
):
    """In a flush as in an update; then all have rank 0's state."""
    job = Job(comm, kind, steps)
    job.update(3 * steps + steps // 2)
    if job.is_among(adding):
        replace_link(job.optimizer, "third", 1, comm.rank)
    before = job.everywhere()
    with pytest.raises(RankMismatchError, match="third"):
        job.optimizer.flush()
    assert job.everywhere() == before
    if not job.is_among(adding):
        replace_link(job.optimizer, "third", 1, comm.rank)
    found = job.everywhere()
    job.optimizer.flush()
    assert job.assert_alike() == found[0]
    job.assert_trains_on()


@pairwise(kind=KINDS, optimizer=["MomentumSGD", "Adam"], changing=[0, -1], steps=[1, 2])
def test_a_link_that_one_rank_replaces_while_all_add_one_has_rank_0s_state(
    comm, kind, optimizer, changing, steps
):
    """Old momenta don't meet new ones."""
    job = Job(comm, kind, steps, optimizer)
    job.update(3 * steps)
    replace_link(job.optimizer, "third", 1, comm.rank)
    if job.is_among(changing):
        replace_link(job.optimizer, "second", 2, comm.rank)
    job.update(steps)
    job.assert_alike()
    job.optimizer.flush()
    job.assert_trains_on()


@pairwise(kind=KINDS, who=RANKS, steps=[1, 2], left=[0, 1], assume=[False, True])
def test_gradients_of_a_link_that_was_replaced_before_saving_move_no_other(
    comm, kind, who, steps, left, assume
):
    """Neither those in flight nor those of a group, on any rank."""
    job = Job(comm, kind, steps, "SGD")
    job.update(2 * steps + left * (steps - 1), factor=64)
    if job.is_among(RANKS[who]):
        replace_link(job.optimizer, "second", 1)
    other = Job(comm, kind, steps, "SGD", tiny(SEED, 50 + comm.rank))
    for one, twin in (job.model, other.model), (job.optimizer, other.optimizer):
        load_state(twin, state_of(one))
    job.optimizer.finalize()
    if assume and RANKS[who] is None:
        other.optimizer.assume_synchronized()
    expected = comm.bcast_obj(parameters(other.model))
    other.update(2 * steps, unused=None)
    other.optimizer.flush()
    found = other.assert_alike()
    if RANKS[who] != -1:  # rank 0 has a new one
        for name in "/second/w", "/second/s":
            assert found[name] == expected[name].tobytes(), name
    other.assert_trains_on()


# Hooks that fail, and updates.


@pairwise(kind=KINDS, failing=[0, -1], timing=["pre", "post"], steps=[1, 2])
def test_a_hook_that_fails_in_a_step_that_overflows_costs_one_update(
    comm, kind, failing, timing, steps
):
    job = Job(comm, kind, steps)
    job.optimizer.loss_scaling(interval=1)
    job.update(3 * steps)
    planned = []

    def fail(*_):
        if planned:
            raise PlantedError(planned.pop())

    job.optimizer.add_hook(fail, name="fail", timing=timing)
    # With double buffering the failing step is along the group before.
    job.update(steps * (1 + KINDS[kind].delay) - 1, factor=np.inf)
    fails = job.is_among(failing)
    planned += ["planted"] * fails
    with pytest.raises(PlantedError) if fails else contextlib.nullcontext():
        job.update(factor=np.inf)
    found = job.everywhere()
    assert len({state["loss scale"] for state in found}) == 2
    job.update()
    assert job.assert_alike() == found[0]
    job.optimizer.flush()
    job.assert_trains_on()


@pairwise(kind=KINDS, steps=[1, 2, 3], left=[0, 1], scaling=[None, "dynamic"])
def test_another_model_is_trained_as_by_a_new_optimizer(
    comm, kind, steps, left, scaling
):
    """No group nor flight of the one before is left."""
    job = Job(comm, kind, steps)
    job.update(2 * steps + left * (steps - 1))
    job.optimizer.setup(tiny(SEED, 20 + comm.rank))
    new = Job(comm, kind, steps, model=tiny(SEED, 20 + comm.rank))
    new.number = job.number
    for each in job, new:
        if scaling:
            each.optimizer.loss_scaling(interval=1)
    for number in range(3 * steps):
        job.update()
        new.update()
        assert job.optimizer.t == max(0, (number + 1) // steps - KINDS[kind].delay)
        assert job.assert_alike() == new.assert_alike()
    for each in job, new:
        each.optimizer.flush()
        assert each.optimizer.t == 3
        each.assert_trains_on()


@pairwise(kind=KINDS, optimizer=OPTIMIZERS, failing=RANKS, scale=[None, 8.0])
def test_0d_parameters_stay_arrays_where_an_update_within_a_group_failed(
    comm, kind, optimizer, failing, scale
):
    job = Job(comm, kind, 3, optimizer)
    if scale is not None:
        job.optimizer.set_loss_scale(scale)

    def fail():
        raise PlantedError

    for _ in range(2):
        job.update()
        if job.is_among(RANKS[failing]):
            with pytest.raises(PlantedError):
                job.optimizer.update(fail)
        else:
            job.update()
        job.update()
    job.optimizer.flush()
    assert job.optimizer.t == 2
    for param in job.model.params():
        assert isinstance(param.array, np.ndarray)
        assert isinstance(param.grad, chainer.get_array_types())
    job.assert_trains_on()
