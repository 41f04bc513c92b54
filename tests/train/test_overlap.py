"""Gradients that leave during backward: parameters become those of the synchronous way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from chainermn_comm import PeerError, RankMismatchError, create_communicator
from chainermn_train import create_multi_node_optimizer
from tests.support.doubles.gpu_streams import parameters_on_gpus
from tests.support.training.marks import PlantedError, marked, raise_planted
from tests.support.training.overlapped import (
    WIDTH,
    Deep,
    Twins,
    batch,
    sending,
)
from tests.support.training.overlapped import small_buckets as small_buckets
from tests.support.training.trainers import parameter_bits, same_everywhere
from tests.support.worlds.topologies import on_nodes

pytestmark = pytest.mark.world

UPDATES = 10
# Updates: the first gives all ranks rank 0's weights if there is no loss function.
UNTIL_PLANNED = 2
NODES = {3: (0, 0, 1), 4: (0, 0, 1, 1)}
# Memory that ranks share, and the stream of messages.
LAYOUTS = ("one node", "a node a rank")

some_ranks = pytest.mark.sizes(2, 3, 4)
on_one_rank = pytest.mark.parametrize("where", [0, -1])


def communicator_on(nodes, world, **settings):
    if nodes == "one node":
        return create_communicator(**settings)
    if nodes == "a node a rank":
        return on_nodes(range(world.size), **settings)
    return on_nodes(NODES[world.size], **settings)


@pytest.fixture(
    scope="module",
    params=[pytest.param(nodes, marks=pytest.mark.ranks(2)) for nodes in LAYOUTS],
)
def comm(request):
    from mpi4py import MPI

    with communicator_on(request.param, MPI.COMM_WORLD) as made:
        yield made


# Models.


class Mixed(chainer.Chain):
    """Parameters of three dtypes, in turn; one has no numbers, and one's gradient is transposed."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.scale = chainer.Parameter(np.ones((), np.float16))
            self.empty = chainer.Parameter(np.zeros((0, 3), np.float32))
            self.double = chainer.Parameter(np.eye(WIDTH))
            self.last = L.Linear(WIDTH, WIDTH)

    def __call__(self, x):
        h = F.matmul(F.cast(x, "f8"), self.double, transb=True)
        h = F.mean(self.last(F.cast(F.tanh(h), "f4")) ** 2) + F.sum(self.empty)
        return h * F.cast(self.scale, "f4")


@dataclass(frozen=True)
class Case:
    """A model, where ranks are, settings, and whether gradients leave during backward."""

    model: Callable[[], Any]
    nodes: str = "a node a rank"
    wire: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    is_early: bool = True


some_share = partial(Case, nodes="some share")
CASES = [
    *(Case(model, nodes) for model in (Deep, Mixed) for nodes in LAYOUTS),
    # Rounding depends on what else is in a message.
    Case(Deep, wire="float16", is_early=False),
    Case(Deep, wire="float32"),
    Case(Mixed, wire="float16", is_early=False),
    Case(Mixed, wire="float32", is_early=False),
    # A node's sums are rounded as their message asks.
    pytest.param(some_share(Deep), marks=pytest.mark.sizes(3, 4)),
    pytest.param(some_share(Mixed, is_early=False), marks=pytest.mark.sizes(3, 4)),
    Case(Deep, settings={"zero_fill": False}),
    Case(Deep, settings={"accumulate_steps": 3}, is_early=False),
]


@pytest.mark.parametrize("case", CASES)
def test_parameters_become_those_of_the_synchronous_way(world, case):
    with communicator_on(case.nodes, world, allreduce_grad_dtype=case.wire) as comm:
        twins = Twins(comm, case.model, **case.settings)
        with sending(comm) as events:
            twins.update(UPDATES)
        planned = events.count("planned")
        assert planned >= UPDATES - UNTIL_PLANNED if case.is_early else planned == 0
        twins.each(lambda _, optimizer: optimizer.flush())
        twins.assert_equal()
        twins.finalize()


# What it is for.


def overlapping(comm, **settings):
    model = Deep()
    actual = chainer.optimizers.SGD(0.1)
    optimizer = create_multi_node_optimizer(actual, comm, **settings)
    return optimizer.setup(model), model


@some_ranks
def test_gradients_leave_before_backward_ends(comm):
    """Those of the last layers have left when backward comes to the first one, and not before."""
    optimizer, model = overlapping(comm, overlap=True)
    with sending(comm) as events:

        def loss(x):
            h = marked(model.first(x), partial(events.append, "at the first"))
            h = marked(F.tanh(model.second(h)), partial(events.append, "at the second"))
            return F.mean(model.last(F.tanh(model.third(h))) ** 2)

        for number in range(UNTIL_PLANNED + 1):
            events.clear()
            optimizer.update(loss, batch(comm.rank, number))
    second = events.index("at the second")
    first = events.index("at the first")
    assert 0 < second < first - 1
    assert first < len(events) - 1
    optimizer.finalize()


@some_ranks
@pytest.mark.parametrize("on_gpus", [False, True])
@pytest.mark.parametrize("overlap", [None, True, False])
def test_by_default_it_is_on_over_several_machines_and_for_parameters_on_gpus(
    comm, overlap, on_gpus
):
    is_on = overlap
    if overlap is None:
        is_on = on_gpus or comm.inter_size > 1
    where = contextlib.nullcontext()
    if on_gpus:
        where = parameters_on_gpus()
    with where, sending(comm) as events:
        optimizer, model = overlapping(comm, overlap=overlap)
        for number in range(4):
            optimizer.update(model, batch(comm.rank, number))
        optimizer.finalize()
    assert ("planned" in events) == is_on


# What needs the synchronous way.


class OwnBackward:
    """What a loss function may return instead of a variable."""

    def __init__(self, loss):
        self.loss = loss

    def backward(self, loss_scale=None):
        self.loss.backward(retain_grad=True, loss_scale=loss_scale)


def replacing(model, x):
    """After its backward another gradient is put in the place of the one that has left."""
    loss = model(x)

    def backward(**arguments):
        chainer.Variable.backward(loss, **arguments)
        model.last.W.grad = model.last.W.grad * 2
        model.first.W.grad = None

    loss.backward = backward
    return loss


def calling_backward(model, x):
    loss = model(x)
    model.cleargrads()
    loss.backward()
    return model(x)


LOSSES = {
    "its own backward": {"loss": lambda model, x: OwnBackward(model(x))},
    "calls backward": {"loss": calling_backward},
    "replacing": {"loss": replacing},
    "computed before": {"without_loss": True},
}


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.ci) for kind in LOSSES]
)
def test_any_loss_trains_as_ever(comm, kind, before):
    """From the first update on, in between, and on one rank only."""
    twins = Twins(comm)
    twins.update(before)
    for where in None, 0, comm.size - 1:
        how = {}
        if where is None or comm.rank == where:
            how = LOSSES[kind]
        twins.update(3, **how)
        twins.update(3)
    twins.finalize()


# Errors.


def until(events, twins, most=4):
    """Make updates until gradients leave during backward on all ranks."""
    for _ in range(most):
        events.clear()
        twins.update()
        if all(twins.comm.allgather_obj("planned" in events)):
            return
    raise AssertionError("gradients leave after backward for good")


@some_ranks
@on_one_rank
def test_a_bucket_that_can_not_be_handed_in_is_an_error_on_all(
    comm, monkeypatch, where
):
    optimizer, model = overlapping(comm, overlap=True)
    kind = type(comm.make_reducer())
    add = kind.add_planned
    errors = []

    def add_planned(self, bucket):
        if errors:
            raise errors.pop()
        return add(self, bucket)

    monkeypatch.setattr(kind, "add_planned", add_planned)
    for number in range(UNTIL_PLANNED):
        optimizer.update(model, batch(comm.rank, number))
    if comm.rank == where % comm.size:
        errors.append(PlantedError())
    with pytest.raises((PlantedError, PeerError)):
        optimizer.update(model, batch(comm.rank, 0))
    assert not errors
    optimizer.update(model, batch(comm.rank, 0))
    assert same_everywhere(comm, model)
    optimizer.finalize()


def failing(model, x):
    """Backward fails in its middle."""
    h = marked(F.tanh(model.first(x)), raise_planted)
    return F.mean(model.last(model.third(F.tanh(model.second(h)))) ** 2)


# What one rank does, with its communicator, model and optimizer, and what all raise.
MISTAKES = {
    "another call": (lambda comm, *_: comm.bcast_obj("else"), RankMismatchError),
    "a flush": (lambda comm, model, it: it.flush(), RankMismatchError),
    "an error": (lambda comm, *_: comm.handshake("else", error=PlantedError()), None),
    "a loss": (lambda comm, model, it: it.update(raise_planted), None),
    "backward": (lambda comm, model, it: it.update(failing, model, batch(0, 0)), None),
}


@some_ranks
@on_one_rank
@pytest.mark.parametrize("others_fail", [False, True])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_after_a_mistake_of_one_rank_training_goes_on(
    comm, mistake, others_fail, where
):
    """However often, and whether or not the other ranks have sent anything."""
    act, errors = MISTAKES[mistake]
    if errors is None or others_fail:
        errors = (PlantedError, PeerError)

    def part(model, optimizer):
        call = partial(optimizer.update, model, batch(0, 0))
        if comm.rank == where % comm.size:
            call = partial(act, comm, model, optimizer)
        elif others_fail:
            call = partial(optimizer.update, raise_planted)
        before = parameter_bits(model)
        with pytest.raises(errors):
            call()
        assert parameter_bits(model) == before

    twins = Twins(comm)
    with sending(comm) as events:
        until(events, twins)
        twins.each(part)
        twins.each(part)
        twins.finalize()
        until(events, twins)
    twins.finalize()


# Parameters and settings that change.


def freeze(*frozen):
    """Freeze these layers, and thaw the others."""

    def change(model, _):
        for name in "first", "second", "third":
            if name in frozen:
                model[name].disable_update()
            else:
                model[name].enable_update()

    return change


# What happens in turn, while there is a plan for other parameters.
CHANGES = {
    "one layer": [freeze("first"), freeze("second"), freeze("third")],
    "two layers": [freeze("first", "second"), freeze("second", "third")],
    "more and fewer": [freeze("first"), freeze("first", "second"), freeze()],
    "an end": [lambda _, it: it.flush(), lambda _, it: it.finalize()],
}


@pytest.mark.parametrize("what", CHANGES)
def test_gradients_leave_early_again_after_a_change(comm, what):
    twins = Twins(comm)
    with sending(comm) as events:
        until(events, twins)
        for change in CHANGES[what]:
            twins.each(change)
            twins.update(3)
            until(events, twins)
    twins.finalize()


def send_as_float16(model, optimizer):
    optimizer.communicator.set_config("allreduce_grad_dtype", np.float16)


def cast_scale(model, optimizer):
    """The parameter stays the same object, so that ranks don't see it change."""
    model.scale.array = model.scale.array.astype("f8")
    model.scale.cleargrad()


@some_ranks
@on_one_rank
@pytest.mark.parametrize(
    ("model", "change", "words"),
    [(Deep, send_as_float16, "allreduce_grad_dtype"), (Mixed, cast_scale, "float64")],
)
def test_what_one_rank_changes_is_named(world, model, change, words, where):
    """Messages are as planned until ranks know of it; when all have changed it, they follow."""

    def mismatch(model, optimizer):
        with pytest.raises(RankMismatchError, match=words):
            optimizer.update(model, batch(world.rank, 0))

    with communicator_on("a node a rank", world) as comm:
        twins = Twins(comm, model, lambda: chainer.optimizers.SGD(0.1))
        with sending(comm) as events:
            until(events, twins)
            if comm.rank == where % comm.size:
                twins.each(change)
            twins.each(mismatch)
            if comm.rank != where % comm.size:
                twins.each(change)
            twins.update(3)
        twins.finalize()
