"""What isn't a communicator of ours can stand for one: mocks in users' tests, and wrappers."""

from __future__ import annotations

from unittest import mock

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.training import extensions

from chainermn_comm import CommunicatorBase
from chainermn_train import (
    create_multi_node_checkpointer,
    create_multi_node_evaluator,
    create_multi_node_optimizer,
    get_epoch_trigger,
    scatter_dataset,
    scatter_index,
)
from tests.support.training.linear import Model, X, sgd
from tests.support.training.trainers import (
    parameter_bits,
    same_everywhere,
    trainer_over,
)

THREE = np.ones((4, 3), np.float32)


class Double:
    """What a user's test may have written."""

    rank, size = 0, 1

    def __init__(self):
        self.calls = []

    def bcast_data(self, model):
        self.calls.append(("bcast_data", model))

    def multi_node_mean_grad(self, model, zero_fill=False):
        self.calls.append(("multi_node_mean_grad", model, zero_fill))


class OldDouble:
    """As for ChainerMN 1.3; it needs no rank either."""

    def __init__(self):
        self.calls = []

    def bcast_data(self, model):
        self.calls.append(("bcast_data", model))

    def allreduce_grad(self, model):
        self.calls.append(("allreduce_grad", model))


def magic(**attributes):
    return mock.MagicMock(**attributes)


DOUBLES = {
    "mock": magic,
    "mock of rank 0": lambda: magic(rank=0, size=1),
    "mock of several": lambda: magic(rank=1, size=4),
    "mock of the class": lambda: magic(spec=CommunicatorBase, rank=0, size=1),
    "own class": Double,
    "of 1.3": OldDouble,
}


def calls_of(comm):
    """What was called, and forget it."""
    if isinstance(comm, mock.Mock):
        calls = [(name, *args, *kwds) for name, args, kwds in comm.mock_calls]
        comm.reset_mock()
    else:
        calls, comm.calls = comm.calls, []
    return calls


def give_gradients(model):
    for param in model.params():
        param.grad = np.ones_like(param.array)


@pytest.mark.parametrize("kind", DOUBLES)
@pytest.mark.parametrize("zero_fill", [True, False])
def test_a_double_is_asked_for_what_older_versions_asked_for(kind, zero_fill):
    comm, model = DOUBLES[kind](), L.Linear(3, 2)
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(lr=1.0), comm, zero_fill=zero_fill
    )
    assert optimizer.setup(model) is optimizer
    assert calls_of(comm) == []
    give_gradients(model)
    optimizer.update()
    assert calls_of(comm) == [("bcast_data", model)]
    assert optimizer.t == 0
    mean = ("multi_node_mean_grad", model, zero_fill)
    if kind == "of 1.3":
        mean = ("allreduce_grad", model)
    for number in range(1, 3):
        before = model.W.array.copy()
        give_gradients(model)
        optimizer.update()
        assert calls_of(comm) == [mean]
        assert optimizer.t == number
        np.testing.assert_array_equal(model.W.array, before - 1)
    model.add_param("added", initializer=np.zeros(2, np.float32))
    optimizer.setup(model)
    give_gradients(model)
    optimizer.update()
    assert calls_of(comm) == [("bcast_data", model)]


@pytest.mark.parametrize("kind", DOUBLES)
@pytest.mark.parametrize("how", [{}, {"double_buffering": True}, {"overlap": True}])
def test_a_double_serves_with_losses_too(kind, how):
    """The first update steps then, since parameters are there before the loss is computed."""
    comm, model = DOUBLES[kind](), L.Linear(3, 2)
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.Adam(), comm, **how
    ).setup(model)
    for _ in range(3):
        optimizer.update(lambda: F.sum(model(THREE)))
    assert optimizer.t == 3 - ("double_buffering" in how)
    names = [name for name, *_ in calls_of(comm)]
    mean = "allreduce_grad" if kind == "of 1.3" else "multi_node_mean_grad"
    optimizer.finalize()
    assert names == ["bcast_data", *[mean] * 3]


def bad_batch():
    raise FloatingPointError("bad batch")


def test_a_loss_that_fails_is_raised_with_a_double_too():
    comm, model = magic(), L.Linear(3, 2)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
    with pytest.raises(FloatingPointError, match="bad batch"):
        optimizer.update(bad_batch)
    optimizer.update(lambda: F.sum(model(THREE)))
    assert optimizer.t == 1


class OwnOptimizer:
    t, target = 0, None

    def setup(self, link):
        self.target = link
        return self

    def update(self, lossfun=None):
        assert lossfun is None
        self.t += 1


def mocked_rules():
    actual = chainer.GradientMethod()
    actual.create_update_rule = magic()
    return actual


@pytest.mark.parametrize("make", [mocked_rules, OwnOptimizer])
@pytest.mark.parametrize("losses", [False, True])
def test_an_optimizer_of_any_class_serves(make, losses):
    actual, comm, model = make(), magic(), L.Linear(3, 2)
    optimizer = create_multi_node_optimizer(actual, comm).setup(model)
    for _ in range(3):
        give_gradients(model)
        optimizer.update(*[lambda: F.sum(model(THREE))] * losses)
    assert actual.t == optimizer.t == 2 + losses
    assert optimizer.target is model
    assert calls_of(comm)[0] == ("bcast_data", model)
    assert len(comm.mock_calls) == 0
    if make is mocked_rules:
        model.W.update_rule.update.assert_called_with(model.b)


def test_an_optimizer_that_is_a_mock_is_told_to_step():
    actual, comm, model = magic(), magic(), L.Linear(3, 2)
    actual.target = model
    optimizer = create_multi_node_optimizer(actual, comm).setup(model)
    assert calls_of(actual) == [("setup", model)]
    give_gradients(model)
    optimizer.update()
    assert calls_of(comm) == [("bcast_data", model)]
    assert actual.update.mock_calls == []
    optimizer.update()
    assert calls_of(comm) == [("multi_node_mean_grad", model, True)]
    assert actual.update.mock_calls == [mock.call(None)]


@pytest.mark.parametrize(
    "kind", [kind for kind in DOUBLES if kind != "mock of several"]
)
def test_everything_else_of_one_rank_needs_nobody(kind, tmp_path):
    comm, model = DOUBLES[kind](), L.Linear(3, 2)
    part = scatter_dataset(np.arange(6), comm)
    assert part[:] == list(range(6))
    assert scatter_index(6, comm) == (0, 6)
    assert get_epoch_trigger(2, part, 4, comm) == (4, "iteration")
    iterator = chainer.iterators.SerialIterator(THREE, 2, repeat=False, shuffle=False)

    def loss(x):
        chainer.report({"loss": F.sum(model(x) * 0 + 3)}, model)

    evaluator = extensions.Evaluator(iterator, model, eval_func=loss)
    assert create_multi_node_evaluator(evaluator, comm)() == {"main/loss": 12}
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    optimizer.setup(L.Classifier(model, lambda y, _: F.sum(y)))
    examples = [(x, 0) for x in THREE]
    checkpointer = create_multi_node_checkpointer("name", comm, path=str(tmp_path))
    for before in 0, 2:
        trainer = trainer_over(examples, 2, optimizer, (2, "iteration"), tmp_path)
        checkpointer.maybe_load(trainer, optimizer)
        assert trainer.updater.iteration == before
        trainer.run()
        checkpointer.save(trainer)
    assert {name for name, *_ in calls_of(comm)} <= {
        *("bcast_data", "multi_node_mean_grad", "allreduce_grad")
    }


class Wrapper:
    """As one that measures time: a class of its own, with a communicator in it."""

    def __init__(self, comm):
        self.comm, self.means = comm, 0

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def multi_node_mean_grad(self, model, zero_fill=False):
        assert [*model.params()]
        self.means += 1
        self.comm.multi_node_mean_grad(model, zero_fill)


@pytest.mark.world
@pytest.mark.parametrize("how", [{}, {"overlap": True}, {"accumulate_steps": 2}])
def test_a_wrapper_of_a_communicator_is_one(comm, how):
    wrapper, model, other = Wrapper(comm), Model(comm.rank), Model(comm.rank)
    optimizer = sgd(wrapper, model, **how)
    for _ in range(4):
        optimizer.update(model, X + comm.rank)
    assert same_everywhere(comm, model)
    reference = sgd(comm, other, **how)
    for _ in range(4):
        reference.update(other, X + comm.rank)
    assert parameter_bits(model) == parameter_bits(other)
    assert wrapper.means == 4 // how.get("accumulate_steps", 1)
    part = scatter_dataset(
        np.arange(2 * comm.size) if comm.rank == 0 else None, wrapper
    )
    assert part[:] == [2 * comm.rank, 2 * comm.rank + 1]


@pytest.mark.parametrize(
    "wrong",
    [
        "naive",
        CommunicatorBase,
        Double,
        object(),
        {"bcast_data": 1},
        L.Linear(2, 2),
    ],
)
def test_anything_else_is_refused(wrong):
    with pytest.raises(
        TypeError, match="create_multi_node_optimizer needs a communicator"
    ):
        create_multi_node_optimizer(chainer.optimizers.SGD(), wrong)
    with pytest.raises(TypeError, match=r"scatter_dataset.*needs a communicator"):
        scatter_dataset([1], wrong)
    with pytest.raises(TypeError, match="needs a Chainer optimizer"):
        create_multi_node_optimizer(wrong, magic())


def test_a_double_of_several_ranks_cannot_agree():
    with pytest.raises(TypeError, match="not MagicMock with 4 ranks"):
        scatter_dataset([1], magic(rank=0, size=4))
