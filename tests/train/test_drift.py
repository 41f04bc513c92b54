"""Ranks that have drifted apart are noticed within one turn of the cursor, and nothing else is."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace

import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Chain, Parameter
from chainer.optimizer_hooks import GradientClipping, WeightDecay
from chainer.optimizers import SGD, Adam
from numpy.random import RandomState

from chainermn_comm import RankMismatchError, create_communicator
from chainermn_train import create_multi_node_optimizer
from chainermn_train.optimizers import drift
from tests.support.doubles.synchronizations import written_down
from tests.support.oracles.raised import raises_on_all
from tests.support.plugins.pairwise import pairwise
from tests.support.training.exchanges import KINDS, WHOLE_KINDS, exchanging, states
from tests.support.training.trainers import float32_parameters

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]

BATCH = 2
WIDTH = 24
# Parts of the model and of Adam's two moments. The first array has two parts, and the
# float16 parameter a float32 value as well.
TURN = 3 * (2 + 1 + 1 + 1 + 1 + 1) + 1


@pytest.fixture(autouse=True)
def all_compared():
    """Slices are compared in turn, as by default: takes the place of the other tests' fixture."""


class Net(Chain):
    def __init__(self, seed):
        super().__init__()
        np.random.seed(seed)
        with self.init_scope():
            self.first = L.Linear(WIDTH, WIDTH)
            self.last = L.Linear(WIDTH, 3)
            self.scale = Parameter(np.ones((), np.float32))
            self.half = Parameter(np.ones(3, np.float16))

    def __call__(self, x):
        half = F.sum(self.half)
        factor = self.scale + F.cast(half, np.float32)
        return F.mean(self.last(F.tanh(self.first(x))) ** 2) * factor


def trained(comm, kind, updates, **how):
    """An optimizer after so many updates."""
    optimizer = exchanging(kind, comm, Adam(), Net(comm.rank), **how)
    optimizer.use_fp32_update()
    update(comm, optimizer, updates)
    return optimizer


def update(comm, optimizer, count):
    random = RandomState(comm.rank)
    for _ in range(count):
        x = random.uniform(-1, 1, (BATCH, WIDTH)).astype(np.float32)
        optimizer.update(optimizer.target, x)


def are_alike(comm, optimizer):
    own = states(optimizer)
    return comm.allgather_obj(own) == [own] * comm.size


def flip(array):
    """A bit of the last element."""
    bits = array.reshape(-1).view(np.uint32)
    bits[-1] ^= 1 << 3


def rule(param):
    return param.update_rule


def change_on_t(optimizer, model):
    return setattr(optimizer, "t", optimizer.t + 1)


def change_value_of_parameter_first_w(_, model):
    return flip(model.first.W.array)


def change_float32_value_of_parameter_half(_, model):
    return flip(float32_parameters(model)["/half"])


def change_m_of_state_of_parameter_last_w(_, model):
    return flip(rule(model.last.W).state["m"])


def change_v_of_state_of_parameter_first_b(_, model):
    return flip(rule(model.first.b).state["v"])


def change_t_of_update_rule_of_parameter_last_b(_, model):
    return setattr(rule(model.last.b), "t", 7)


# By what an error says of it, what happens to a rank's optimizer and model.
DISTURBED = {
    "on t: ": change_on_t,
    "value of parameter /first/W": change_value_of_parameter_first_w,
    "value of parameter /scale": lambda _, model: flip(model.scale.array),
    "float32 value of parameter /half": change_float32_value_of_parameter_half,
    "m of state of parameter /last/W": change_m_of_state_of_parameter_last_w,
    "v of state of parameter /first/b": change_v_of_state_of_parameter_first_b,
    "t of update rule of parameter /last/b": change_t_of_update_rule_of_parameter_last_b,
}


def take_for_gpus(monkeypatch):
    """Let the detector take arrays for those on GPUs, whose copies are made when it waits."""
    begun = []

    def wait(copies):
        for source, target in copies:
            target[...] = source

    def pinned(nbytes):
        return np.empty(nbytes, np.uint8)

    def copy(source, target, _):
        begun.append((source, target))

    devices = SimpleNamespace(
        on_gpu=lambda _: True,
        using_device_of=nullcontext,
        pinned=pinned,
        current_stream=lambda: None,
        copy=copy,
        recorded_event=begun.pop,
    )
    monkeypatch.setattr(drift, "devices", devices)
    monkeypatch.setattr(drift, "staging", SimpleNamespace(wait=wait))


@pytest.mark.parametrize("comm", ["hierarchical"], indirect=True)
@pairwise(kind=WHOLE_KINDS, name=DISTURBED, where=[0, -1], memory=["host", "GPU"])
def test_what_differs_is_named_within_a_turn_until_it_is_mended(
    comm, monkeypatch, kind, name, where, memory
):
    if memory == "GPU":
        take_for_gpus(monkeypatch)
    optimizer = trained(comm, kind, 0)
    model = optimizer.target
    # Else values that moments move may differ first.
    for param in (model.last.W, model.last.b, model.first.b):
        rule(param).hyperparam.alpha = 0
    update(comm, optimizer, TURN + 5)
    t = optimizer.t
    if comm.rank == where % comm.size:
        DISTURBED[name](optimizer, model)
    with pytest.raises(RankMismatchError, match=name) as raised:
        update(comm, optimizer, 2 * TURN)
    assert optimizer.t - t <= TURN
    text = str(raised.value)
    assert f"on rank {where % comm.size}" in text
    assert "synchronize()" in text
    since, _, _ = text.partition("since t = ")[2].partition(")")
    assert t - 2 * TURN <= int(since) <= t
    before = states(optimizer)
    # Nothing is lost, nobody goes on.
    with pytest.raises(RankMismatchError, match=name):
        update(comm, optimizer, 1)
    assert before == states(optimizer)
    optimizer.synchronize()
    assert are_alike(comm, optimizer)
    update(comm, optimizer, 1)
    optimizer.finalize()


@pytest.mark.parametrize("kind", WHOLE_KINDS)
@pytest.mark.parametrize("updates", [1, 2, TURN])
def test_a_copy_begins_a_turn_of_its_own(comm, kind, updates):
    """Equal states are no drift in it, and a bit is."""
    optimizer = deepcopy(trained(comm, kind, updates))
    update(comm, optimizer, 2 * TURN)
    assert are_alike(comm, optimizer)
    if comm.rank == 0:
        flip(optimizer.target.first.W.array)
    with pytest.raises(RankMismatchError, match="parameter /first/W"):
        update(comm, optimizer, TURN + 1)


def test_settings_are_compared_after_a_synchronization_that_came_first(comm):
    optimizer = trained(comm, "synchronous", 0)
    optimizer.hyperparam.alpha += comm.rank
    optimizer.synchronize()
    with pytest.raises(RankMismatchError, match="hyperparameters"):
        update(comm, optimizer, 1)


def step_otherwise(optimizer, rank):
    optimizer.alpha = 0.1 * rank


def step_one_otherwise(optimizer, rank):
    optimizer.target.last.b.update_rule.hyperparam.alpha = 0.1 * rank


def decay_otherwise(optimizer, rank):
    optimizer.add_hook(WeightDecay(0.1 * rank))


def clip_otherwise(optimizer, rank):
    optimizer.add_hook(GradientClipping(1 + rank))


def decay_one_otherwise(optimizer, rank):
    rule(optimizer.target.last.b).add_hook(WeightDecay(0.1 * rank))


def decay_one_on_one_rank(optimizer, rank):
    if rank == 1:
        rule(optimizer.target.first.b).add_hook(WeightDecay(0.1))


# By what an error says of it.
OTHERWISE = {
    "alpha of hyperparameters: ": step_otherwise,
    "alpha of hyperparameters of parameter /last/b": step_one_otherwise,
    "rate of WeightDecay": decay_otherwise,
    "GradientClipping 1 on rank 0": clip_otherwise,
    "rate of WeightDecay of hooks of /last/b": decay_one_otherwise,
    "WeightDecay of hooks of /first/b": decay_one_on_one_rank,
}


@pytest.mark.parametrize("words", OTHERWISE)
def test_sharded_ranks_that_step_by_different_numbers_are_told(comm, words):
    """All have equal parameters nevertheless."""
    optimizer = trained(comm, "sharded", 2)
    OTHERWISE[words](optimizer, comm.rank)
    with pytest.raises(RankMismatchError, match=words):
        update(comm, optimizer, TURN)


@pytest.mark.parametrize("kind", WHOLE_KINDS)
def test_where_warnings_are_errors_all_ranks_raise_and_then_go_on(comm, kind):
    optimizer = trained(comm, kind, 3, on_drift="synchronize")
    if comm.rank:
        flip(optimizer.target.first.W.array)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with raises_on_all(
            comm.rank == 0, RuntimeWarning, "value of parameter /first/W"
        ):
            update(comm, optimizer, TURN)
        warnings.simplefilter("ignore")
        update(comm, optimizer, TURN)
    assert are_alike(comm, optimizer)
    optimizer.finalize()


@pytest.mark.sizes(2, 3, 4)
def test_equal_numbers_of_other_types_are_no_difference():
    """Nor are objects of the user's: ranks compare nothing more in an update."""
    with written_down("flat") as (comm, calls):
        optimizer = trained(comm, "synchronous", 1)
        number = 1.0
        if comm.rank > 0:
            number = 1
        for param in optimizer.target.params():
            param.update_rule.hyperparam.eta = number
            param.update_rule.hyperparam.schedule = object()
        calls.clear()
        update(comm, optimizer, TURN)
        assert sum(call.is_agreement for call in calls) == TURN
        optimizer.finalize()


def test_dummy_exchanges_nothing_so_that_nothing_is_compared():
    with create_communicator("dummy") as comm:
        optimizer = trained(comm, "synchronous", TURN)
        assert optimizer.t == TURN
        assert not are_alike(comm, optimizer)


def test_numbers_that_are_none_may_have_other_bits(comm):
    optimizer = trained(comm, "synchronous", 1)
    scale = optimizer.target.scale
    scale.update_rule.enabled = False  # a step would make the bits alike
    scale.array.reshape(-1).view(np.uint32)[...] = 0x7FC00000 + comm.rank
    update(comm, optimizer, TURN)
    assert optimizer.t == 1 + TURN
    assert not are_alike(comm, optimizer)


def test_an_unknown_wish_is_named(naive):
    with pytest.raises(ValueError, match="raise, synchronize, ignore, not 'repair'"):
        create_multi_node_optimizer(SGD(), naive, on_drift="repair")


@pytest.mark.full
@pytest.mark.parametrize("kind", WHOLE_KINDS)
def test_nothing_else_is_taken_for_drift(comm, kind):
    optimizer = trained(comm, kind, 10_000)
    assert optimizer.t == 10_000 - KINDS[kind].delay
    optimizer.finalize()
