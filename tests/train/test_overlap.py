"""Gradients that leave during backward: parameters become those of the synchronous way."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Chain, Parameter, Variable
from chainer.optimizers import SGD

from chainermn_comm import PeerError, RankMismatchError
from chainermn_train import create_multi_node_optimizer
from tests.support.training.overlapped import (
    WIDTH,
    Deep,
    PlantedError,
    Twins,
    batch,
    marked,
    parameters_on_gpus,
    raise_planted,
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
X = batch(0, 0)
APART = "a node a rank"
NODES = {"one node": "0000", APART: "0123", "some share": "0011"}

some_ranks = pytest.mark.sizes(2, 3, 4)
on_one_rank = pytest.mark.parametrize("where", [0, -1])


def communicator_on(nodes, world, **settings):
    return on_nodes(NODES[nodes][: world.size], **settings)


# Memory that ranks share, and the stream of messages.
@pytest.fixture(
    scope="module",
    params=[pytest.param(it, marks=pytest.mark.ranks(2)) for it in ("one node", APART)],
)
def comm(request):
    from mpi4py import MPI

    with communicator_on(request.param, MPI.COMM_WORLD) as made:
        yield made


# Models.


class Mixed(Chain):
    """Parameters of three dtypes, in turn; one has no numbers, and one's gradient is transposed."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.scale = Parameter(np.ones((), np.float16))
            self.empty = Parameter(np.zeros((0, 3), np.float32))
            self.double = Parameter(np.eye(WIDTH))
            self.last = L.Linear(WIDTH, WIDTH)

    def __call__(self, x):
        h = F.matmul(F.cast(x, "f8"), self.double, transb=True)
        h = F.mean(self.last(F.cast(F.tanh(h), "f4")) ** 2) + F.sum(self.empty)
        return h * F.cast(self.scale, "f4")


# A model, where ranks are, settings, and whether gradients leave during backward.
CASES = [
    *[
        (model, nodes, {}, True)
        for model in (Deep, Mixed)
        for nodes in ("one node", APART)
    ],
    # Rounding depends on what else is in a message.
    (Deep, APART, {"wire": "float16"}, False),
    (Deep, APART, {"wire": "float32"}, True),
    (Mixed, APART, {"wire": "float32"}, False),
    # A node's sums are rounded as their message asks.
    pytest.param(Deep, "some share", {}, True, marks=pytest.mark.sizes(3, 4)),
    pytest.param(Mixed, "some share", {}, False, marks=pytest.mark.sizes(3, 4)),
    (Deep, APART, {"zero_fill": False}, True),
    (Deep, APART, {"accumulate_steps": 3}, False),
]


@pytest.mark.parametrize(("model", "nodes", "settings", "is_early"), CASES)
def test_parameters_become_those_of_the_synchronous_way(
    world, model, nodes, settings, is_early
):
    settings = dict(settings)
    wire = settings.pop("wire", None)
    with communicator_on(nodes, world, allreduce_grad_dtype=wire) as comm:
        twins = Twins(comm, model, **settings)
        with sending(comm) as events:
            twins.update(UPDATES)
        planned = events.count("planned")
        assert planned >= UPDATES - UNTIL_PLANNED if is_early else planned == 0
        twins.each(lambda _, optimizer: optimizer.flush())
        twins.assert_equal()
        twins.finalize()


# What it is for.


def overlapping(comm, **settings):
    model = Deep()
    actual = SGD(0.1)
    optimizer = create_multi_node_optimizer(actual, comm, **settings)
    return optimizer.setup(model), model


def update_until_planned(comm, events, update):
    """Update until gradients leave during backward on all ranks."""
    for _ in range(4):
        events.clear()
        update()
        if all(comm.allgather_obj("planned" in events)):
            return
    raise AssertionError("gradients leave after backward for good")


@some_ranks
def test_gradients_leave_before_backward_ends(comm):
    """Those of the last layers have left when backward comes to the first one, and not before."""
    optimizer, model = overlapping(comm, overlap=True)
    with sending(comm) as events:

        def loss(x):
            h = marked(model.first(x), partial(events.append, "first"))
            h = marked(F.tanh(model.second(h)), partial(events.append, "second"))
            return F.mean(model.last(F.tanh(model.third(h))) ** 2)

        for _ in range(UNTIL_PLANNED + 1):
            events.clear()
            optimizer.update(loss, X)
    assert [*dict.fromkeys(events)] == ["planned", "second", "first"]
    assert "planned" in events[events.index("second") : events.index("first")]
    assert events[-1] == "planned"
    optimizer.finalize()


@some_ranks
@pytest.mark.parametrize("on_gpus", [False, True])
def test_by_default_it_is_on_over_several_machines_and_for_parameters_on_gpus(
    comm, on_gpus
):
    where = nullcontext()
    if on_gpus:
        where = parameters_on_gpus()
    with where, sending(comm) as events:
        optimizer, model = overlapping(comm)
        for _ in range(UNTIL_PLANNED + 1):
            optimizer.update(model, X)
        optimizer.finalize()
    assert ("planned" in events) == (on_gpus or comm.inter_size > 1)


# What needs the synchronous way.


class OwnBackward:
    """What a loss function may return instead of a variable."""

    def __init__(self, loss):
        self.loss = loss

    def backward(self, loss_scale=None):
        self.loss.backward(retain_grad=True, loss_scale=loss_scale)


def calling_backward(model, x):
    loss = model(x)
    model.cleargrads()
    loss.backward()
    return model(x)


LOSSES = [lambda model, x: OwnBackward(model(x)), calling_backward]


@pytest.mark.ci
@pytest.mark.parametrize("loss", LOSSES)
def test_any_loss_trains_as_ever(comm, loss):
    """From the first update on, in between, and on one rank only."""
    twins = Twins(comm)
    for where in None, 0, comm.size - 1, None:
        own = None
        if where in (None, comm.rank):
            own = loss
        twins.update(3, own)
        twins.update(3)
    twins.finalize()


# Errors.


def failing(model, x):
    """Backward fails in its middle."""
    return F.mean(model.last(marked(model.first(x), raise_planted)) ** 2)


def replacing(model, x):
    """After its backward another gradient is put in the place of the one that has left."""
    loss = model(x)

    def backward(**arguments):
        Variable.backward(loss, **arguments)
        model.last.W.grad = model.last.W.grad * 2

    loss.backward = backward
    return loss


def update_without_a_bucket(comm, model, optimizer):
    """The first bucket can't be given to the reducer."""
    kind = type(comm.make_reducer())
    errors = [PlantedError()]
    add = kind.add_planned

    def add_planned(self, bucket):
        if errors:
            raise errors.pop()
        return add(self, bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "add_planned", add_planned)
        optimizer.update(model, X)


RAISED = (PlantedError, PeerError)


def an_error(comm, *_):
    return comm.handshake("else", error=PlantedError())


def a_loss(comm, model, it):
    return it.update(raise_planted)


def own_backward(comm, model, it):
    return it.update(failing, model, X)


def a_gradient(comm, model, it):
    return it.update(replacing, model, X)


# What one rank does, with its communicator, model and optimizer, and what all raise.
MISTAKES = {
    "another call": (lambda comm, *_: comm.bcast_obj("else"), RankMismatchError),
    "a flush": (lambda comm, model, it: it.flush(), RankMismatchError),
    "an error": (an_error, RAISED),
    "a loss": (a_loss, RAISED),
    "backward": (own_backward, RAISED),
    "a bucket": (update_without_a_bucket, RAISED),
    "a gradient": (
        a_gradient,
        (RuntimeError, PeerError),
    ),
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
    optimizer, model = overlapping(comm, overlap=True)
    update = partial(optimizer.update, model, X)
    call = update
    if others_fail:
        errors = RAISED
        call = partial(optimizer.update, raise_planted)
    if comm.rank == where % comm.size:
        call = partial(act, comm, model, optimizer)
    with sending(comm) as events:
        for _ in range(2):
            update_until_planned(comm, events, update)
            before = parameter_bits(model)
            with pytest.raises(errors):
                call()
            assert parameter_bits(model) == before
        update_until_planned(comm, events, update)
    assert same_everywhere(comm, model)
    optimizer.finalize()


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
    "more and fewer": [freeze("first"), freeze("first", "second"), freeze()],
    "an end": [lambda _, it: it.flush(), lambda _, it: it.finalize()],
}


@pytest.mark.parametrize("what", CHANGES)
def test_gradients_leave_early_again_after_a_change(comm, what):
    twins = Twins(comm)
    with sending(comm) as events:
        update_until_planned(comm, events, twins.update)
        for change in CHANGES[what]:
            twins.each(change)
            twins.update(3)
            update_until_planned(comm, events, twins.update)
    twins.finalize()


def test_a_lazy_link_that_no_loss_uses_is_added(comm):
    def add_link(model, _):
        with model.init_scope():
            model.unused = L.Linear(None, 1)

    twins = Twins(comm)
    with sending(comm) as events:
        update_until_planned(comm, events, twins.update)
        twins.each(add_link)
        twins.update(3)
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
            optimizer.update(model, X)

    is_odd = world.rank == where % world.size
    with communicator_on(APART, world) as comm, sending(comm) as events:
        twins = Twins(comm, model, lambda: SGD(0.1))
        update_until_planned(comm, events, twins.update)
        if is_odd:
            twins.each(change)
        twins.each(mismatch)
        if not is_odd:
            twins.each(change)
        twins.update(3)
        twins.finalize()
