"""Ranks that have drifted apart are noticed within one turn, and nothing else is."""

from __future__ import annotations

import contextlib
import copy
import warnings

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from chainermn_comm import PeerError, RankMismatchError, create_communicator
from chainermn_train import create_multi_node_optimizer
from chainermn_train.optimizers import drift
from tests.support.training.exchanges import HIERARCHICAL, KINDS, exchanging, states
from tests.support.training.trainers import float32_parameters

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]

BATCH, WIDTH = 2, 24
# Parts of the model and Adam's two moments: the first array has two.
TURN = 3 * (2 + 1 + 1 + 1 + 1)


@pytest.fixture(autouse=True)
def all_compared():
    """Slices are compared in turn, as by default: takes the place of the other tests' fixture."""


class Net(chainer.Chain):
    def __init__(self, seed):
        super().__init__()
        np.random.seed(seed)
        with self.init_scope():
            self.first, self.last = L.Linear(WIDTH, WIDTH), L.Linear(WIDTH, 3)
            self.scale = chainer.Parameter(np.ones((), np.float32))

    def __call__(self, x):
        return F.mean(self.last(F.tanh(self.first(x))) ** 2) * self.scale


def batch(rank, number):
    random = np.random.RandomState((rank, number))
    return random.uniform(-1, 1, (BATCH, WIDTH)).astype(np.float32)


def trained(comm, kind, updates=3, **how):
    model = Net(comm.rank)
    arguments = {**KINDS[kind].arguments, **how}
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.Adam(), comm, **arguments
    )
    optimizer.setup(model)
    update(comm, optimizer, updates)
    return model, optimizer


def update(comm, optimizer, count):
    for number in range(count):
        optimizer.update(optimizer.target, batch(comm.rank, number))


def flip(array):
    """A bit of the last element."""
    bits = array.reshape(-1).view(np.uint32)
    bits[-1] ^= 1 << 3


DISTURBED = {
    "parameter": (
        lambda model: flip(model.first.W.array),
        "value of parameter /first/W",
    ),
    "0-d parameter": (
        lambda model: flip(model.scale.array),
        "value of parameter /scale",
    ),
    "momentum": (
        lambda model: flip(model.last.W.update_rule.state["m"]),
        "m of state of parameter /last/W",
    ),
    "second moment": (
        lambda model: flip(model.first.b.update_rule.state["v"]),
        "v of state of parameter /first/b",
    ),
    "count": (
        lambda model: setattr(model.last.b.update_rule, "t", 7),
        "t of update rule of parameter /last/b",
    ),
}


@HIERARCHICAL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", DISTURBED)
@pytest.mark.parametrize("where", [0, -1])
def test_what_differs_is_named_within_a_turn_until_it_is_mended(
    comm, kind, what, where
):
    disturb, name = DISTURBED[what]
    model, optimizer = trained(comm, kind, updates=0)
    # Else values that moments move may differ first.
    for param in (model.last.W, model.first.b):
        param.update_rule.hyperparam.alpha = 0
    update(comm, optimizer, TURN + 5)
    t = optimizer.t
    if comm.rank == where % comm.size:
        disturb(model)
    with pytest.raises(RankMismatchError, match=name) as raised:
        update(comm, optimizer, 2 * TURN)
    assert optimizer.t - t <= TURN
    assert "synchronize()" in str(raised.value)
    assert f"on rank {where % comm.size}" in str(raised.value)
    before = states(optimizer)
    # Nothing is lost, nobody goes on.
    with pytest.raises(RankMismatchError, match=name):
        update(comm, optimizer, 1)
    assert before == states(optimizer)
    optimizer.synchronize()
    assert comm.allgather_obj(states(optimizer)) == [states(optimizer)] * comm.size
    update(comm, optimizer, 2 * TURN)
    optimizer.finalize()


@HIERARCHICAL
def test_the_float32_array_beside_a_float16_parameter_is_compared_too(comm):
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0), comm)
    with chainer.using_config("dtype", np.float16):
        model = L.Linear(WIDTH, 3)
    optimizer.setup(model).use_fp32_update()
    x = batch(comm.rank, 0).astype(np.float16)

    def train(updates):
        for _ in range(updates):
            optimizer.update(lambda: F.mean(model(x)))

    train(2)
    if comm.rank == 1:
        flip(float32_parameters(model)["/b"])
    with pytest.raises(RankMismatchError, match="float32 value of parameter /b"):
        train(4)


@HIERARCHICAL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("updates", [1, 2, 3, TURN])
def test_a_copy_begins_a_turn_of_its_own(comm, kind, updates):
    """Equal states are no drift."""
    _, optimizer = trained(comm, kind, updates=updates)
    optimizer = copy.deepcopy(optimizer)
    update(comm, optimizer, 2 * TURN)
    assert comm.allgather_obj(states(optimizer)) == [states(optimizer)] * comm.size
    optimizer.finalize()


@HIERARCHICAL
def test_settings_are_compared_after_a_synchronization_that_came_first(comm):
    model = Net(comm.rank)
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1 * (1 + comm.rank)), comm
    )
    optimizer.setup(model)
    optimizer.synchronize()
    with pytest.raises(RankMismatchError, match="hyperparameters"):
        update(comm, optimizer, 1)


@HIERARCHICAL
@pytest.mark.parametrize("kind", KINDS)
def test_another_count_of_steps_is_named_at_once(comm, kind):
    _, optimizer = trained(comm, kind)
    t = optimizer.t
    optimizer.t = t + (comm.rank == 1)
    with pytest.raises(
        RankMismatchError, match=rf"disagree on t: {t} on .*{t + 1} on rank 1"
    ):
        update(comm, optimizer, 1)
    optimizer.synchronize()
    update(comm, optimizer, 1)
    assert optimizer.t == t + 1 - KINDS[kind].delay
    optimizer.finalize()


@HIERARCHICAL
def test_it_is_told_since_when_ranks_may_differ(comm):
    """The bit is flipped after one whole turn and a half."""
    model, optimizer = trained(comm, "synchronous", updates=TURN + TURN // 2)
    t = optimizer.t
    if comm.rank == 0:
        flip(model.first.W.array[:1, :1])
    with pytest.raises(
        RankMismatchError, match="value of parameter /first/W"
    ) as raised:
        update(comm, optimizer, 2 * TURN)
    since = int(str(raised.value).partition("since t = ")[2].partition(")")[0])
    assert t - TURN <= since <= t
    optimizer.finalize()


@HIERARCHICAL
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_mended_from_rank_0_where_that_was_asked_for(comm, kind):
    model, optimizer = trained(comm, kind, on_drift="synchronize")
    kept = model.first.W.array.copy()
    if comm.rank:
        flip(model.first.W.array)
        optimizer.t += 1
    t = comm.bcast_obj(optimizer.t)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        update(comm, optimizer, 1)
    assert [str(each.message).partition(": ")[0] for each in told] == [
        "update on rank 0"
    ] * (comm.rank == 0)
    assert optimizer.t == t  # nobody steps
    np.testing.assert_array_equal(model.first.W.array, kept)
    update(comm, optimizer, TURN)
    assert comm.allgather_obj(states(optimizer)) == [states(optimizer)] * comm.size
    optimizer.finalize()


@HIERARCHICAL
@pytest.mark.parametrize("kind", KINDS)
def test_where_warnings_are_errors_all_ranks_raise_and_then_go_on(comm, kind):
    model, optimizer = trained(comm, kind, on_drift="synchronize")
    if comm.rank:
        flip(model.first.W.array)
    raised = RuntimeWarning if comm.rank == 0 else PeerError
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(raised, match="value of parameter /first/W"):
            update(comm, optimizer, TURN)
        warnings.simplefilter("ignore")
        update(comm, optimizer, TURN)
    assert comm.allgather_obj(states(optimizer)) == [states(optimizer)] * comm.size
    optimizer.finalize()


@HIERARCHICAL
def test_nothing_is_compared_where_that_was_asked_for(comm):
    model, optimizer = trained(comm, "synchronous", on_drift="ignore")
    if comm.rank:
        flip(model.first.W.array)
    update(comm, optimizer, 2 * TURN)
    assert optimizer.t == 3 + 2 * TURN


def test_dummy_exchanges_nothing_so_that_nothing_is_compared():
    with create_communicator("dummy") as comm:
        _, optimizer = trained(comm, "synchronous", updates=2 * TURN)
        assert optimizer.t == 2 * TURN
        assert (
            len({state["/first/W"] for state in comm.allgather_obj(states(optimizer))})
            > 1
        )


@HIERARCHICAL
def test_numbers_that_are_none_may_have_other_bits(comm):
    model, optimizer = trained(comm, "synchronous", updates=1)
    bits = model.first.W.array.reshape(-1)[:1].view(np.uint32)
    bits[...] = 0x7FC00000 + comm.rank
    update(comm, optimizer, 3)
    assert optimizer.t == 4


@HIERARCHICAL
def test_what_drifts_in_a_copy_is_noticed(comm):
    _, optimizer = trained(comm, "synchronous", updates=5)
    optimizer = copy.deepcopy(optimizer)
    update(comm, optimizer, 2 * TURN)
    if comm.rank == 0:
        flip(optimizer.target.first.W.array)
    with pytest.raises(RankMismatchError, match="parameter /first/W"):
        update(comm, optimizer, TURN + 1)


def test_an_unknown_wish_is_named(naive):
    with pytest.raises(ValueError, match="raise, synchronize, ignore, not 'repair'"):
        create_multi_node_optimizer(chainer.optimizers.SGD(), naive, on_drift="repair")


@HIERARCHICAL
@pytest.mark.parametrize(
    "updates",
    [
        pytest.param(300, marks=pytest.mark.ranks(2)),
        pytest.param(10_000, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_else_is_taken_for_drift(comm, kind, updates):
    model = Net(comm.rank)
    optimizer = exchanging(kind, comm, chainer.optimizers.Adam(), model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-4))
    update(comm, optimizer, updates)
    assert optimizer.t == updates - KINDS[kind].delay
    optimizer.finalize()


# Parameters on GPUs.


class DeviceArray(np.ndarray):
    """A double of a GPU's array, of which copies to the host are made when they are waited for."""


@pytest.fixture
def waits(monkeypatch):
    """How many copies were waited for, each time the host waits."""
    counts = []

    def wait(events):
        counts.append(len(events))
        for source, target in events:
            target[...] = source

    copied = []
    double = {
        "on_gpu": lambda array: isinstance(array, DeviceArray),
        "using_device_of": lambda _: contextlib.nullcontext(),
        "c_ordered": lambda array: array,
        "pinned": lambda nbytes: np.empty(nbytes, np.uint8),
        "current_stream": lambda: None,
        "copy": lambda source, target, _: copied.append((source, target)),
        "recorded_event": lambda: copied.pop(),
    }
    for name, function in double.items():
        monkeypatch.setattr(drift.devices, name, function)
    monkeypatch.setattr(drift.staging, "wait", wait)
    return counts


def sorted_params(model):
    return [param for _, param in sorted(model.namedparams())]


class Twin:
    """A model whose parameters a detector takes for those on a GPU."""

    def __init__(self):
        self.model = Net(0)
        self.optimizer = chainer.optimizers.SGD().setup(self.model)
        self.arrays = {id(p): p.array.view(DeviceArray) for p in self.model.params()}
        self.params = sorted_params(self.model)
        self.detector = drift.DriftDetector()

    def checksum(self, monkeypatch):
        with monkeypatch.context() as patch:
            arrays = property(lambda param: self.arrays[id(param)])
            patch.setattr(chainer.Parameter, "array", arrays)
            found = self.detector.checksum(self.params, self.optimizer.t)
            self.detector.advance()
        return found


@pytest.mark.parametrize(
    "disturb",
    [
        lambda model: flip(model.last.W.array),
        lambda model: setattr(model.first.b.update_rule, "t", 3),
    ],
)
def test_from_gpus_slices_come_while_the_step_computes(monkeypatch, waits, disturb):
    """And are compared in the next update; a change is seen within a turn and an update."""
    one, other = Twin(), Twin()
    turn = 2 + 1 + 1 + 1 + 1
    for _ in range(2 * turn):
        assert one.checksum(monkeypatch) == other.checksum(monkeypatch)
    assert waits
    disturb(other.model)
    found = [
        one.checksum(monkeypatch) == other.checksum(monkeypatch)
        for _ in range(turn + 1)
    ]
    assert not all(found)


def test_moments_are_in_the_turn_that_goes_on_after_the_first_step():
    """They come to be in it: one that was cut before begins anew."""
    twins = []
    for _ in range(2):
        model = Net(0)
        optimizer = chainer.optimizers.Adam().setup(model)
        twins.append((model, optimizer, sorted_params(model), drift.DriftDetector()))

    def checksums():
        found = []
        for _, optimizer, params, detector in twins:
            found.append(detector.checksum(params, optimizer.t))
            detector.advance()
        return found

    assert len(set(checksums())) == 1
    for model, optimizer, *_ in twins:
        for param in model.params():
            param.grad = np.ones_like(param.array)
        optimizer.update()
    array = twins[1][0].first.W.update_rule.state["v"]
    array.reshape(-1).view(np.uint32)[0] ^= 1
    # Behind the rest of the value, and the first moment.
    assert [len(set(checksums())) for _ in range(4)] == [1, 1, 1, 2]
