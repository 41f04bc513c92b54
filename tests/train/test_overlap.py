"""Gradients that leave during backward: parameters become those of the synchronous way."""

from __future__ import annotations

import copy
from functools import partial

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from chainermn_comm import PeerError, RankMismatchError, create_communicator
from chainermn_train import create_multi_node_optimizer
from tests.support.doubles.gpu_streams import Streams, parameters_on_gpus
from tests.support.training.overlapped import (
    CLASSES,
    WIDTH,
    Deep,
    Twins,
    batch,
    sending,
)
from tests.support.training.overlapped import small_buckets as small_buckets
from tests.support.training.trainers import parameter_bits, same_everywhere
from tests.support.worlds.third_party import PlainCommunicator
from tests.support.worlds.topologies import on_nodes

pytestmark = pytest.mark.world

UPDATES = 10
NODES = {3: (0, 0, 1), 4: (0, 0, 1, 1)}
# Updates: the first gives all ranks rank 0's weights if there is no loss function.
UNTIL_PLANNED = 2


def make_communicator(nodes, world):
    return create_communicator() if nodes == "one node" else on_nodes(range(world.size))


@pytest.fixture(
    scope="module",
    params=[  # memory that ranks share, and the stream of messages
        pytest.param(nodes, marks=pytest.mark.ranks(2))
        for nodes in ("one node", "a node a rank")
    ],
)
def comm(request):
    from mpi4py import MPI

    made = make_communicator(request.param, MPI.COMM_WORLD)
    yield made
    made.finalize()


class PlantedError(Exception):
    """What fails on one rank."""


# Models.


class Mixed(chainer.Chain):
    """Parameters of three dtypes, in turn."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(WIDTH, WIDTH)
            self.scale = chainer.Parameter(np.ones((), np.float16))
            self.second = L.Linear(
                WIDTH, WIDTH, initialW=chainer.initializers.Normal(dtype="f8")
            )
            self.second.b.array = self.second.b.array.astype("f8")
            self.third = L.Linear(WIDTH, WIDTH)

    def __call__(self, x):
        h = F.cast(F.tanh(self.second(F.cast(F.tanh(self.first(x)), "f8"))), "f4")
        return F.mean(self.third(h) ** 2) * F.cast(self.scale, "f4")


class Convolutional(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv, self.norm = L.Convolution2D(1, 16, 3), L.BatchNormalization(16)
            self.wide, self.last = L.Linear(16 * 8 * 24, 40), L.Linear(40, CLASSES)

    def __call__(self, x):
        h = F.relu(self.norm(self.conv(x.reshape(-1, 1, 10, 26))))
        return F.mean(self.last(self.wide(h)) ** 2)


class Reused(Deep):
    """A layer three times, with one between, and a layer never."""

    def __call__(self, x):
        h = F.tanh(self.first(F.tanh(self.first(x))))
        return F.mean(self.last(F.tanh(self.first(F.tanh(self.second(h))))) ** 2)


class Forgetful(Deep):
    """The second layer computes anew in a backward of its own; the first is used there, too."""

    def __call__(self, x):
        h = F.tanh(self.first(x))
        h = F.forget(lambda h: F.tanh(self.second(self.first(h))), h)
        return F.mean(self.last(F.tanh(self.third(h))) ** 2)


class Sparse(chainer.Chain):
    """An embedding; a parameter without numbers; a matrix whose gradient is transposed."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(WIDTH, WIDTH)
            self.empty = chainer.Parameter(np.zeros((0, 3), "f4"))
            self.turned = chainer.Parameter(np.eye(WIDTH, dtype="f4"))

    def __call__(self, x):
        h = self.embed((abs(x[:, :5]) * 100).astype("i4"))
        h = F.matmul(h.reshape(-1, WIDTH), self.turned, transb=True)
        return F.mean(F.tanh(h) ** 2) + F.sum(self.empty)


MODELS = {
    "deep": Deep,
    "mixed": Mixed,
    "convolutional": Convolutional,
    "reused": Reused,
    "forgetful": Forgetful,
    "sparse": Sparse,
}


@pytest.mark.parametrize("model", MODELS)
def test_parameters_become_those_of_the_synchronous_way(comm, model):
    twins = Twins(comm, MODELS[model])
    with sending(comm) as events:
        twins.update(UPDATES)
    assert events.count("planned") >= UPDATES - UNTIL_PLANNED
    twins.finalize()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wire", [np.float16, np.float32])
@pytest.mark.parametrize("model", ["deep", "mixed", "convolutional"])
def test_with_another_dtype_on_the_wire_too(world, model, wire):
    """After backward, if narrower: rounding depends on what else is in a message."""
    with on_nodes(range(world.size), allreduce_grad_dtype=wire) as other:
        twins = Twins(other, MODELS[model])
        with sending(other) as events:
            twins.update(UPDATES)
        assert ("planned" in events) == (wire is np.float32 and model != "mixed")
        twins.finalize()


@pytest.mark.sizes(3, 4)
@pytest.mark.parametrize("model", ["deep", "mixed"])
def test_where_some_ranks_share_a_node_too(world, model):
    """What has 16 bits travels after backward: a node's sums are rounded as their message asks."""
    with on_nodes(NODES[world.size]) as other:
        twins = Twins(other, MODELS[model])
        with sending(other) as events:
            twins.update(UPDATES)
        assert ("planned" in events) == (model == "deep")
        twins.finalize()


def test_without_zero_fill_too(comm):
    twins = Twins(comm, zero_fill=False)
    with sending(comm) as events:
        twins.update(8)
    assert "planned" in events
    twins.finalize()


# What it is for.


class Mark(chainer.FunctionNode):
    """The identity, that tells of its backward, or fails there."""

    def __init__(self, told):
        self.told = told

    def forward(self, inputs):
        return inputs

    def backward(self, indexes, grad_outputs):
        self.told()
        return grad_outputs


def marked(x, told):
    return Mark(told).apply(
        (x if isinstance(x, chainer.Variable) else chainer.Variable(x),)
    )[0]


@pytest.mark.sizes(2, 3, 4)
def test_gradients_leave_before_backward_ends(comm):
    """Those of the last layers have left when backward comes to the first one, and not before."""
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm, overlap=True
    )
    model = Deep()
    optimizer.setup(model)
    with sending(comm) as events:

        def loss(x):
            h = F.tanh(model.first(marked(x, lambda: events.append("at the input"))))
            h = F.tanh(
                model.second(marked(h, lambda: events.append("below the second")))
            )
            h = marked(h, lambda: events.append("above the second"))
            return F.mean(model.last(F.tanh(model.third(h))) ** 2)

        for number in range(UNTIL_PLANNED + 1):
            events.clear()
            optimizer.update(loss, batch(comm.rank, number))
    middle, low, end = map(
        events.index, ["above the second", "below the second", "at the input"]
    )
    assert 1 <= events[:middle].count("planned") < events[:low].count("planned")
    assert events[:low].count("planned") < events[:end].count("planned")
    assert "after backward" not in events
    optimizer.finalize()


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("overlap", "expected"), [(None, None), (True, True), (False, False)]
)
def test_by_default_it_is_on_where_ranks_sit_on_several_machines(
    comm, overlap, expected
):
    arguments = {} if overlap is None else {"overlap": overlap}
    if expected is None:
        expected = comm.inter_size > 1
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm, **arguments
    )
    model = Deep()
    optimizer.setup(model)
    with sending(comm) as events:
        for number in range(4):
            optimizer.update(model, batch(comm.rank, number))
    assert ("planned" in events) == expected
    optimizer.finalize()


@pytest.mark.parametrize(("overlap", "expected"), [(None, True), (False, False)])
def test_by_default_it_is_on_where_parameters_are_on_gpus(comm, overlap, expected):
    model = Deep()
    with parameters_on_gpus(), sending(comm) as events:
        optimizer = create_multi_node_optimizer(
            chainer.optimizers.SGD(0.1), comm, overlap=overlap
        )
        optimizer.setup(model)
        for number in range(4):
            optimizer.update(model, batch(comm.rank, number))
    assert ("planned" in events) == expected
    optimizer.finalize()


def test_on_a_gpu_the_thread_has_a_stream_of_its_own(comm):
    """A double of CuPy's streams writes down who does what in which order."""
    streams = Streams()
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm, overlap=True
    )
    twin = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm, overlap=False)
    models = Deep(), Deep()
    models[1].copyparams(models[0])
    optimizer.setup(models[0])
    twin.setup(models[1])
    with streams.installed():
        for number in range(4):
            optimizer.update(models[0], batch(comm.rank, number))
    for number in range(4):
        twin.update(models[1], batch(comm.rank, number))
    assert streams.thread == 3 * ["device", "stream entered", "stream left"]
    # The main thread's stream waits for it then, and the host for neither.
    of_an_update = ["event made", "recorded", "stream waits for event"]
    assert [done for done in streams.main if done != "device"] == 3 * of_an_update
    streams.make_stream.assert_called_with(non_blocking=True)
    for param, other in zip(models[0].params(), models[1].params(), strict=True):
        np.testing.assert_allclose(param.array, other.array, rtol=1e-6)
    optimizer.finalize()


# What needs the synchronous way.


class OwnBackward:
    """What a loss function may return instead of a variable."""

    def __init__(self, loss):
        self.loss = loss

    def backward(self, loss_scale=None):
        self.loss.backward(retain_grad=True, loss_scale=loss_scale)


def with_penalty(model, x):
    x = chainer.Variable(x)
    loss = model(x)
    (gradient,) = chainer.grad([loss], [x], enable_double_backprop=True)
    return loss + F.sum(gradient**2)


def replacing(model, x):
    """After its backward another gradient is put in the place of the one that has left."""
    loss = model(x)

    def backward(**arguments):
        chainer.Variable.backward(loss, **arguments)
        model.last.W.grad = model.last.W.grad * 2
        model.first.W.grad = None

    loss.backward = backward
    return loss


def retaining(model, x):
    """Backward keeps the gradients of all variables."""
    loss = model(x)
    loss.backward = partial(loss.backward, True)  # retain_grad
    return loss


def calling_backward(model, x):
    loss = model(x)
    model.cleargrads()
    loss.backward()
    return model(x)


LOSSES = {
    "its own backward": lambda model, x: OwnBackward(model(x)),
    "calls backward": calling_backward,
    "penalty": with_penalty,
    "replacing": replacing,
    "retained": retaining,
}


@pytest.mark.ci
@pytest.mark.parametrize("kind", LOSSES)
def test_any_loss_trains_as_ever(comm, kind):
    """From the first update on, in between, and on one rank only."""
    loss = LOSSES[kind]
    for before in 0, 3:
        twins = Twins(comm)
        twins.update(before)
        twins.update(3, loss)
        twins.update(3)
        twins.update(3, loss if comm.rank == 0 else None)
        twins.update(3)
        twins.update(3, loss if comm.rank == comm.size - 1 else None)
        twins.update(3)
        twins.finalize()


@pytest.mark.parametrize("before", [0, 3])
def test_without_a_loss_function_it_trains_as_ever(comm, before):
    twins = Twins(comm)
    twins.update(before)
    if not before:
        # Gives all rank 0's weights.
        twins.each(lambda _, optimizer: optimizer.update())
    twins.update(3, without_loss=True)
    twins.update(3)
    twins.update(3, without_loss=comm.rank == 0)
    twins.update(3, without_loss=comm.rank == comm.size - 1)
    twins.finalize()


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("zero_fill", [True, False])
@pytest.mark.parametrize("where", [0, -1])
def test_gradients_that_one_rank_only_has_count(comm, zero_fill, where):
    """Where missing ones don't count as zeros, all raise and nobody steps."""
    here = comm.rank == where % comm.size

    def branch(model, x):
        return model(x) if here else F.mean(model.last(F.tanh(model.third(x))) ** 2)

    twins = Twins(comm, zero_fill=zero_fill)
    for _ in range(2):
        twins.update(3)
        if zero_fill:
            twins.update(3, branch)
        else:
            before = [parameter_bits(model) for model in twins.models]
            for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
                with pytest.raises(RankMismatchError):
                    optimizer.update(branch, model, batch(comm.rank, 0))
            assert before == [parameter_bits(model) for model in twins.models]
    twins.update(3)
    twins.finalize()


def test_a_function_hook_of_the_user_sees_all_functions(comm):
    twins, seen = Twins(comm), []

    class Hook(chainer.FunctionHook):
        name = "mine"

        def backward_postprocess(self, function, inputs, gradients):
            seen.append(function.label)

    with Hook():
        twins.update(4)
    assert seen[: len(seen) // 8] * 8 == seen
    twins.finalize()


def test_lazy_sums_of_gradients_make_no_difference(comm):
    twins = Twins(comm, Reused)
    twins.update(3)
    with chainer.using_config("lazy_grad_sum", True):
        twins.update(4)
    twins.update(2)
    twins.finalize()


def test_a_third_partys_communicator_takes_gradients_after_backward(world):
    comm = PlainCommunicator(world.Dup())
    twins = Twins(comm)
    with sending(comm) as events:
        twins.update(4)
    assert set(events) == {"after backward"}
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


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("failing", [0, -1])
@pytest.mark.parametrize("place", ["middle", "last"])
def test_after_a_failure_on_one_rank_training_goes_on(comm, place, failing):
    """Nobody steps, each rank knows why, and gradients leave during backward again."""
    fails = comm.rank == failing % comm.size

    def fail():
        raise PlantedError(place)

    def loss(model, x):
        told = {each: lambda: None for each in ("middle", "last")}
        if fails:
            told[place] = fail
        h = F.tanh(model.first(marked(x, told["last"])))
        h = F.tanh(model.second(marked(h, told["middle"])))
        return F.mean(model.last(model.third(h)) ** 2)

    twins = Twins(comm)
    with sending(comm) as events:
        for _ in range(3):
            until(events, twins)
            before = [parameter_bits(model) for model in twins.models]
            for _ in range(2):
                for model, optimizer in zip(
                    twins.models, twins.optimizers, strict=True
                ):
                    with pytest.raises(PlantedError if fails else PeerError):
                        optimizer.update(loss, model, batch(comm.rank, 0))
            assert before == [parameter_bits(model) for model in twins.models]
        until(events, twins)
    twins.update(3)
    twins.finalize()


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("failing", [0, -1])
def test_a_bucket_that_can_not_be_handed_in_is_an_error_on_all(
    comm, monkeypatch, failing
):
    twins, kind = Twins(comm), type(comm.make_reducer())
    with sending(comm) as events:
        until(events, twins)
    add, failures = kind.add_planned, [comm.rank == failing % comm.size]

    def fail_once(self, bucket):
        if failures and failures.pop():
            raise PlantedError
        return add(self, bucket)

    monkeypatch.setattr(kind, "add_planned", fail_once)
    raised = []
    for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
        try:
            optimizer.update(model, batch(comm.rank, 0))
        except (PlantedError, PeerError) as error:
            raised.append(type(error))
    assert raised == [PlantedError if comm.rank == failing % comm.size else PeerError]
    for model in twins.models:
        assert same_everywhere(comm, model)
    twins.finalize()


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("failing", [0, -1])
def test_a_function_whose_backward_failed_can_compute_again(comm, failing):
    """Its gradients are the user's then, and go nowhere."""
    twins, graphs = Twins(comm), []
    twins.update(3)

    def loss(model, x):
        graph = model(x)
        graphs.append((model, graph))
        node = graph.creator_node
        while node.label != "LinearFunction":
            node = node.inputs[0].creator_node
        plain = type(node).backward

        def backward(self, indexes, gradients):
            if self is node:
                raise PlantedError
            return plain(self, indexes, gradients)

        patch.setattr(type(node), "backward", backward)
        return graph

    fails = comm.rank == failing % comm.size
    for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
        failing_update = partial(
            optimizer.update, partial(loss, model) if fails else model
        )
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(PlantedError if fails else PeerError),
        ):
            failing_update(batch(0, 0))
    for model, graph in graphs:
        model.cleargrads()
        graph.backward()
        assert model.first.W.grad.any()
    twins.update(3)
    twins.finalize()


def elsewhere_call(comm, optimizer):
    comm.bcast_obj("elsewhere")


def elsewhere_flush(comm, optimizer):
    optimizer.flush()


def elsewhere_fail(comm, optimizer):
    with pytest.raises(PlantedError):
        comm.handshake("elsewhere", error=PlantedError())
    raise PeerError


def planted_loss(model, x):
    raise PlantedError


# What a rank does while the others update; the loss of the others, and what all raise.
ELSEWHERE = {
    "call": (elsewhere_call, None, RankMismatchError),
    "flush": (elsewhere_flush, None, RankMismatchError),
    "fail": (elsewhere_fail, None, PeerError),
    "call while others fail": (elsewhere_call, planted_loss, (PlantedError, PeerError)),
    "flush while others fail": (
        elsewhere_flush,
        planted_loss,
        (PlantedError, PeerError),
    ),
}


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("what", ELSEWHERE)
@pytest.mark.parametrize("where", [0, -1])
def test_ranks_that_call_different_things_raise_and_go_on(comm, what, where):
    """However often, and whether or not the one that was elsewhere has sent anything."""
    action, loss, errors = ELSEWHERE[what]
    twins, here = Twins(comm), comm.rank == where % comm.size
    with sending(comm) as events:
        for count in 1, 2:
            until(events, twins)
            for _ in range(count):
                for model, optimizer in zip(
                    twins.models, twins.optimizers, strict=True
                ):
                    update = partial(
                        optimizer.update, partial(loss, model) if loss else model
                    )
                    with pytest.raises(errors):
                        action(comm, optimizer) if here else update(batch(0, 0))
        until(events, twins)
    twins.update(3)
    twins.finalize()


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize("then", ["flush", "finalize"])
def test_after_a_mismatch_ranks_may_also_flush_or_finalize(comm, where, then):
    twins, here = Twins(comm), comm.rank == where % comm.size
    twins.update(3)
    for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
        with pytest.raises(RankMismatchError):
            elsewhere_call(comm, optimizer) if here else optimizer.update(
                model, batch(0, 0)
            )
    twins.each(lambda _, optimizer: getattr(optimizer, then)())
    twins.update(3)
    twins.finalize()


# Parameters and settings that change.


class Growing(Deep):
    """With a link whose name comes last, once it has it."""

    def __call__(self, x):
        extra = F.sum(self.zzz(x) ** 2) if hasattr(self, "zzz") else 0
        return super().__call__(x) + extra


LAYERS = ("first", "second", "third")
# The layers that are frozen in each part of a training: as many, more and fewer.
FROZEN = {
    "in turn": [{"first"}, {"second"}, {"third"}, {"first"}],
    "pairs in turn": [{"first", "second"}, {"second", "third"}, {"third", "first"}],
    "one after another": [{"first"}, {"first", "second"}, {"second"}, set()],
}


@pytest.mark.parametrize("parts", FROZEN)
def test_layers_that_are_frozen_in_turn_are_left_out(comm, parts):
    def freeze(frozen, model, _):
        for name in LAYERS:
            layer = getattr(model, name)
            if name in frozen:
                layer.disable_update()
            else:
                layer.enable_update()

    twins = Twins(comm, Deep)
    with sending(comm) as events:
        for frozen in FROZEN[parts]:
            twins.each(partial(freeze, frozen))
            twins.update(3)
            until(events, twins)
    twins.finalize()


@pytest.mark.parametrize("change", ["more", "fewer", "as many"])
def test_parameters_said_to_be_synchronized_are_those_that_are_sent(comm, change):
    """All ranks have loaded the same ones, while there was a plan for others."""

    def grow(model, optimizer):
        np.random.seed(5)
        if change == "fewer":
            del model.zzz
        else:
            if change == "as many":
                del model.zzz
            model.add_link("zzz", L.Linear(WIDTH, 4))
            for param in model.zzz.params():
                param.update_rule = optimizer.create_update_rule()
        optimizer.assume_synchronized()

    def make():
        model = Growing()
        if change != "more":
            model.add_link("zzz", L.Linear(WIDTH, 4))
        return model

    twins = Twins(comm, make)
    with sending(comm) as events:
        until(events, twins)
        twins.each(grow)
        twins.update(4)
        until(events, twins)
    twins.finalize()


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("where", [0, -1])
def test_a_wire_dtype_that_one_rank_changes_is_named(world, where):
    """Messages are as planned until ranks know of it; when all have changed it, they follow."""
    with on_nodes(range(world.size)) as own:
        twins = Twins(own)
        with sending(own) as events:
            until(events, twins)
            if own.rank == where % own.size:
                own.set_config("allreduce_grad_dtype", np.float16)
            for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
                with pytest.raises(RankMismatchError, match="allreduce_grad_dtype"):
                    optimizer.update(model, batch(own.rank, 0))
            own.set_config("allreduce_grad_dtype", np.float16)
            twins.update(4)
            own.set_config("allreduce_grad_dtype", None)
            until(events, twins)
            own.set_config("allreduce_grad_dtype", np.float32)
            twins.update()
            until(events, twins)
        twins.finalize()


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("where", [0, -1, None])
def test_a_dtype_that_a_parameter_changes_is_noticed_as_ever(comm, where):
    """The parameter stays the same object, so that ranks don't see it change."""
    twins = Twins(comm, Mixed, lambda: chainer.optimizers.SGD(0.1))
    twins.update(3)
    if where is None or comm.rank == where % comm.size:
        for model in twins.models:
            model.scale.array = model.scale.array.astype("f8")
            model.scale.cleargrad()
    if where is None:
        twins.update(3)
    else:
        for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
            with pytest.raises(RankMismatchError, match="float64"):
                optimizer.update(model, batch(comm.rank, 0))
        for model in twins.models:
            model.scale.array = model.scale.array.astype("f2")
            model.scale.cleargrad()
        twins.update(3)
    twins.finalize()


# The optimizer's life.


def test_a_copy_trains_by_itself(comm):
    """And outlives the one it was made of."""
    twins = Twins(comm)
    with sending(comm) as events:
        until(events, twins)
        copies = copy.deepcopy(twins)
        until(events, copies)
        until(events, twins)
        twins.finalize()
        until(events, copies)
    copies.update(3)
    copies.finalize()


def test_after_flush_and_finalize_training_goes_on(comm):
    twins = Twins(comm)
    with sending(comm) as events:
        for end in "flush", "finalize", "finalize":
            until(events, twins)
            twins.each(lambda _, optimizer, end=end: getattr(optimizer, end)())
        until(events, twins)
    twins.finalize()


@pytest.mark.parametrize("steps", [2, 3])
def test_gradients_that_are_added_up_leave_after_backward(comm, steps):
    twins = Twins(comm, accumulate_steps=steps)
    with sending(comm) as events:
        for _ in range(3 * steps + 1):
            twins.update()
    assert "planned" not in events
    twins.each(lambda _, optimizer: optimizer.flush())
    assert parameter_bits(twins.models[0]) == parameter_bits(twins.models[1])
    assert twins.optimizers[0].t == 4
    twins.finalize()


def test_overlap_and_double_buffering_exclude_each_other(comm):
    with pytest.raises(ValueError, match="overlap"):
        create_multi_node_optimizer(
            chainer.optimizers.SGD(), comm, double_buffering=True, overlap=True
        )


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize("others", [False, None])
def test_ranks_that_were_told_different_things_are_named(comm, where, others):
    overlap = True if comm.rank == where % comm.size else others
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(), comm, overlap=overlap
    )
    model = Deep()
    optimizer.setup(model)
    for _ in range(2):
        with pytest.raises(RankMismatchError, match="overlap"):
            optimizer.update(model, batch(0, 0))


def test_two_optimizers_overlap_in_turn(comm):
    """As those of a generator and a discriminator."""
    twins = [Twins(comm), Twins(comm, Reused)]
    with sending(comm) as events:
        for each in twins * 4:
            each.update()
    assert "planned" in events
    for each in twins:
        assert same_everywhere(comm, each.models[0])
        each.finalize()
