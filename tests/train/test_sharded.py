"""Ranks that step parts of the parameters train as ranks that step all of them do, bit by bit."""

from __future__ import annotations

import copy
import io
import os
import re
import signal
import struct
import threading
import time
from collections import Counter
from itertools import count
from pathlib import Path

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizer_hooks as hooks
from chainer import optimizers
from chainer.serializers import save_npz
from chainer.training import extensions

from chainermn_comm import PeerError, RankMismatchError, create_communicator
from chainermn_train import (
    MultiNodeGradientClipping,
    PowerSGD,
    create_multi_node_optimizer,
    multi_node_snapshot,
)
from tests.support.doubles.synchronizations import written_down
from tests.support.training.checkpoints import Loop, make_checkpointer
from tests.support.training.trainers import (
    load_state,
    parameter_bits,
    same_everywhere,
    state_of,
    trainer_over,
)
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(1, 2, 3, 4)]

WIDTH = 40
EXCHANGES = "chainermn_train.optimizers.exchanges"
PARAMETER_FILE = f"{EXCHANGES}.parameter_file"
RULES = [
    optimizers.AdaGrad,
    optimizers.Adam,
    optimizers.AMSGrad,
    optimizers.MomentumSGD,
    optimizers.SGD,
]
# Without MSVAG, which may round a parameter of no dimension otherwise than an array.
RARE_RULES = (
    "AdaBound AdaDelta AMSBound CorrectedMomentumSGD NesterovAG RMSprop RMSpropGraves "
    "SMORMS3"
)
RULES += [
    pytest.param(getattr(optimizers, name), marks=pytest.mark.ci)
    for name in RARE_RULES.split()
]


@pytest.fixture(
    scope="module",
    params=[
        "one machine",
        "machines",
        pytest.param("plain", marks=pytest.mark.ranks(2)),
    ],
)
def comm(request, naive, plain_communicator):
    """Communicators of one machine, of a rank a machine or more, and a third party's."""
    if request.param == "one machine":
        yield naive
    elif request.param == "plain":
        yield plain_communicator(naive.mpi_comm)
    else:
        comm = on_nodes([0, 1, 0, 1][: naive.size])
        yield comm
        comm.finalize()


class Net(chainer.Chain):
    """Two layers, one of which has its weight twice, and a number."""

    def __init__(self, seed):
        super().__init__()
        random = np.random.RandomState(seed)
        with self.init_scope():
            weights = random.randn(WIDTH, WIDTH).astype(chainer.config.dtype)
            self.first = L.Linear(
                WIDTH, WIDTH, initialW=chainer.initializers.Normal(0.1)
            )
            self.second = L.Linear(WIDTH, WIDTH)
            self.scale = chainer.Parameter(np.array(0.5, chainer.config.dtype))
        self.first.W.array = weights
        self.second.W = self.first.W

    def __call__(self, x):
        h = F.tanh(self.first(x)) * F.broadcast_to(self.scale, x.shape)
        return F.mean_squared_error(self.second(h), x)


def batch(rank, number):
    random = np.random.RandomState((rank, number))
    return random.uniform(-1, 1, (5, WIDTH)).astype(chainer.config.dtype)


def make(comm, rule=optimizers.Adam, sharded=True, seed=0, **settings):
    if not sharded:
        settings["overlap"] = False
    optimizer = create_multi_node_optimizer(rule(), comm, sharded=sharded, **settings)
    return optimizer.setup(Net(seed))


def train(optimizer, *numbers):
    for number in numbers:
        rank = optimizer.communicator.rank
        optimizer.update(optimizer.target, batch(rank, number))
    return optimizer


def whole_state(optimizer):
    """The bits of what the rule of each parameter has on all ranks (collective)."""
    with optimizer.whole_states():
        found = state_of(optimizer.actual_optimizer)
    return {
        name: np.asarray(value).tobytes()
        for name, value in found.items()
        if value is not None
    }


def assert_alike(optimizer, other):
    assert parameter_bits(optimizer.target) == parameter_bits(other.target)
    assert same_everywhere(optimizer.communicator, optimizer.target)
    assert whole_state(optimizer) == whole_state(other)


@pytest.mark.parametrize("rule", RULES)
def test_parts_have_the_bits_of_the_whole(comm, rule):
    """For 100 steps: first without hooks, then with one, then with two."""
    made = [make(comm, rule, sharded, comm.rank) for sharded in (True, False)]
    for each in made:
        train(each, *range(34))
        each.add_hook(hooks.WeightDecay(1e-2))
        train(each, *range(34, 67))
        each.add_hook(hooks.Lasso(1e-3))
        train(each, *range(67, 100))
    assert_alike(*made)


CLIPPING = {
    "never": 1e6,
    "always": 1e-2,
}


@pytest.fixture(scope="module")
def own_rank(naive):
    """A communicator of this rank, which holds the whole model."""
    comm = naive.split(naive.rank, 0)
    yield comm
    comm.finalize()


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize("threshold", CLIPPING.values(), ids=CLIPPING)
def test_clipping_is_by_the_norm_of_all_parts(comm, own_rank, threshold, divided):
    clipping = hooks.GradientClipping(threshold)
    if divided:
        clipping = MultiNodeGradientClipping(threshold, own_rank)
    made = [make(comm, optimizers.SGD, sharded) for sharded in (True, False)]
    for each in made:
        each.add_hook(hooks.WeightDecay(1e-2))
        each.add_hook(clipping)
        each.add_hook(hooks.GradientHardClipping(-1e-3, 1e-3))
        train(each, *range(20))
    sharded, plain = [each.target for each in made]
    for one, other in zip(sharded.params(), plain.params(), strict=True):
        np.testing.assert_allclose(one.array, other.array, rtol=0, atol=1e-6)
    assert same_everywhere(comm, sharded)


# What can't be done by parts.


def add_noise(optimizer):
    optimizer.add_hook(hooks.GradientNoise(0.1))


def look_afterwards(optimizer):
    optimizer.add_hook(hooks.WeightDecay(0.1), timing="post")


def look_at_one(optimizer):
    optimizer.target.first.b.update_rule.add_hook(lambda rule, param: None, "look")


def give_each_element_a_rate(optimizer):
    optimizer.target.first.b.update_rule.hyperparam.lr = np.ones(WIDTH)


def change_the_rule(optimizer):
    rule = optimizer.target.first.b.update_rule
    rule.update_core_cpu = type(rule).update_core_cpu.__get__(rule)


def derive_a_rule(optimizer):
    class Other(type(optimizer.target.first.b.update_rule)):
        pass

    optimizer.target.first.b.update_rule.__class__ = Other


def leave_host_memory(optimizer):
    class Other(np.ndarray):
        pass

    param = optimizer.target.first.b
    param._data = [param.array.view(Other)]  # as cupy.ndarray is another class


class Updating(optimizers.SGD):
    def update(self, *args):
        super().update(*args)


UNSUITABLE = [
    add_noise,
    look_afterwards,
    look_at_one,
    give_each_element_a_rate,
    change_the_rule,
    derive_a_rule,
    leave_host_memory,
]


@pytest.mark.parametrize("spoil", UNSUITABLE)
def test_what_needs_whole_parameters_is_refused_on_all_ranks(naive, spoil):
    optimizer = make(naive, optimizers.SGD)
    spoil(optimizer)
    with pytest.raises(ValueError, match="sharded"):
        train(optimizer, 0)
    assert optimizer.t == 0


@pytest.mark.sizes(2, 3, 4)
def test_clipping_over_the_ranks_of_the_optimizer_is_refused(naive):
    optimizer = make(naive)
    optimizer.add_hook(MultiNodeGradientClipping(1.0, naive))
    with pytest.raises(ValueError, match="ranks in common"):
        train(optimizer, 0)


def test_an_optimizer_that_updates_otherwise_is_refused(naive):
    with pytest.raises(ValueError, match="Updating has an update"):
        train(make(naive, Updating), 0)


def test_other_exchanges_are_refused(naive):
    with pytest.raises(ValueError, match="no double_buffering"):
        make(naive, double_buffering=True)
    for compression in "float16", PowerSGD():
        with pytest.raises(ValueError, match="no compression"):
            make(naive, compression=compression)
    with pytest.raises(ValueError, match="communicator than dummy"):
        make(create_communicator("dummy"))


@pytest.mark.sizes(2, 3, 4)
def test_a_gradient_counts_as_zeros_where_it_is_missing(comm):
    made = [make(comm, sharded=sharded) for sharded in (True, False)]
    for optimizer in made:
        train(optimizer, 0)
        net = optimizer.target
        net.cleargrads()
        net(batch(comm.rank, 1)).backward()
        net.second.b.cleargrad()
        if comm.rank == 1:
            net.first.b.cleargrad()
        optimizer.update()
    assert_alike(*made)
    strict = train(make(comm, zero_fill=False), 0)
    if comm.rank == 1:
        strict.target.scale.cleargrad()
    with pytest.raises(RankMismatchError, match=r"/scale: (no|a) gradient"):
        strict.update()
    assert strict.t == 1


# What users do between updates.


def write_into_arrays(optimizer):
    optimizer.target.first.W.array *= 0.5
    optimizer.target.scale.array[...] = 0.25


def replace_arrays(optimizer):
    param = optimizer.target.first.W
    param.array = param.array * 0.5


def swap_arrays(optimizer):
    first = optimizer.target.first.b
    second = optimizer.target.second.b
    first.array, second.array = second.array, first.array


def reverse(optimizer):
    param = optimizer.target.first.b
    param.array = param.array[::-1]


def copy_all(optimizer):
    twin = copy.deepcopy(optimizer)
    optimizer.finalize()
    train(optimizer, 90)  # which the copy doesn't see
    return twin


def load_a_model(optimizer):
    load_state(optimizer.target, state_of(Net(7)))


def load_both(optimizer):
    model = {name: it.copy() for name, it in state_of(optimizer.target).items()}
    with optimizer.whole_states():
        state = copy.deepcopy(state_of(optimizer))
    train(optimizer, 90)
    load_state(optimizer.target, model)
    load_state(optimizer, state)


def load_a_beginning_on_rank_0(optimizer):
    if optimizer.communicator.rank == 0:
        load_state(optimizer, state_of(optimizers.Adam().setup(Net(0))))
    optimizer.synchronize()


def freeze(optimizer):
    optimizer.target.second.disable_update()
    train(optimizer, 90, 91)
    optimizer.target.second.enable_update()


def replace_a_rule(optimizer):
    param = optimizer.target.first.W
    param.update_rule = optimizer.create_update_rule()


def share_a_rule(optimizer):
    net = optimizer.target
    net.first.b.update_rule = net.second.b.update_rule


def replace_a_link(optimizer):
    optimizer.target.first = L.Linear(WIDTH, WIDTH, initialW=0.1)
    for param in optimizer.target.first.params():
        param.update_rule = optimizer.create_update_rule()


def set_up_again(optimizer):
    optimizer.setup(Net(3))


BETWEEN = [
    write_into_arrays,
    replace_arrays,
    swap_arrays,
    reverse,
    copy_all,
    load_a_model,
    load_both,
    load_a_beginning_on_rank_0,
    freeze,
    replace_a_rule,
    share_a_rule,
    replace_a_link,
    set_up_again,
]


@pytest.mark.parametrize("change", BETWEEN)
def test_users_may_change_all_between_updates(comm, change):
    made = []
    for sharded in True, False:
        optimizer = train(make(comm, sharded=sharded), 0, 1, 2)
        optimizer = change(optimizer) or optimizer
        made.append(train(optimizer, 3, 4, 5, 6))
    assert_alike(*made)


def test_a_transposed_array_becomes_one_in_the_file(comm):
    """Where a product of matrices rounds otherwise than beside an array that lies by columns."""
    made = [train(make(comm, sharded=sharded), 0) for sharded in (True, False)]
    for optimizer in made:
        param = optimizer.target.first.W
        param.array = param.array.T
        train(optimizer, 1, 2)
    sharded, whole = [optimizer.target.first.W.array for optimizer in made]
    np.testing.assert_allclose(sharded, whole, rtol=0, atol=1e-5)


def test_a_state_may_be_loaded_before_parameters_have_values(naive):
    """As SGD's, which has no arrays."""
    model = L.Linear(None, WIDTH)
    sgd = create_multi_node_optimizer(optimizers.SGD(), naive, sharded=True)
    sgd.setup(model)
    load_state(sgd, state_of(sgd))
    whole_state(sgd)
    for _ in range(2):
        sgd.update(lambda: F.sum(model(batch(naive.rank, 0))))
    assert same_everywhere(naive, model)


@pytest.mark.sizes(2, 3, 4)
def test_ranks_compare_nothing_where_nobody_writes(comm, monkeypatch):
    optimizer = train(make(comm), 0)
    with monkeypatch.context() as patched:
        patched.delattr("chainermn_train.optimizers.shared_state.SharedState.compare")
        train(optimizer, 1, 2)
        optimizer.target.scale.array[...] = 1
        with pytest.raises(AttributeError, match="compare"):
            train(optimizer, 3)
    train(optimizer, 4)
    assert same_everywhere(comm, optimizer.target)


def test_written_pages_are_found_where_the_kernel_doesnt_tell(naive, monkeypatch):
    def fail(*args, **kwds):
        raise FileNotFoundError

    monkeypatch.setattr(f"{PARAMETER_FILE}.open", fail, raising=False)
    test_users_may_change_all_between_updates(naive, write_into_arrays)


class Pagemap(io.BytesIO):
    """The kernel's entries of all pages, wherever one looks."""

    def seek(self, *_):
        return 0


@pytest.mark.sizes(1)
@pytest.mark.parametrize(
    ("highest_byte", "is_own"),
    [
        (0x00, False),  # of a page that is nowhere
        (0xA1, False),  # the file's
        (0x81, True),
        (0x41, True),  # swapped out
        (0x61, False),  # the file's, on its way to other memory
    ],
)
def test_a_page_is_own_if_it_is_somewhere_and_not_the_files(
    naive, monkeypatch, highest_byte, is_own
):
    file = train(make(naive), 0)._updates.exchange._file
    entry = struct.pack("=Q", highest_byte << 56)
    contents = entry * 1000
    monkeypatch.setattr(
        f"{PARAMETER_FILE}.open", lambda *_, **__: Pagemap(contents), raising=False
    )
    assert file.has_own_writes() is is_own
    contents = entry  # of the first page alone
    assert file.has_own_writes()


@pytest.mark.sizes(2, 3, 4)
def test_a_rank_that_writes_alone_is_told(comm):
    optimizer = train(make(comm), 0, 1)
    before = optimizer.target.scale.array.copy()
    if comm.rank == 1:
        optimizer.target.scale.array[...] += 1
    assert all(comm.allgather_obj(optimizer.target.scale.array - before)) is False
    with pytest.raises(RankMismatchError, match=r"/scale"):
        train(optimizer, 2)
    optimizer.synchronize()
    train(optimizer, 3)
    assert same_everywhere(comm, optimizer.target)


# What is saved.


def test_a_save_by_one_rank_alone_is_refused(naive, tmp_path):
    optimizer = train(make(naive), 0)
    save_npz(tmp_path / "model", optimizer.target)
    with pytest.raises(RuntimeError, match="create_multi_node_checkpointer"):
        save_npz(tmp_path / "optimizer", optimizer)


@pytest.mark.usefixtures("unsynced")
@pytest.mark.parametrize("sharded", [(True, False), (False, True), (True, True)])
def test_checkpoints_have_the_whole_state(comm, own_rank, folder, sharded):
    optimizer = train(make(comm, sharded=sharded[0]), 0, 1, 2)
    make_checkpointer(comm, folder).save(Loop(optimizer))
    alone = make(own_rank, sharded=sharded[1], seed=2)
    assert make_checkpointer(own_rank, folder).maybe_load(Loop(alone)) == 1
    assert parameter_bits(alone.target) == parameter_bits(optimizer.target)
    assert whole_state(alone) == whole_state(optimizer)
    train(optimizer, 3, 4)
    comm.allgather_obj(None)
    resumed = make(comm, sharded=sharded[1], seed=1)
    assert make_checkpointer(comm, folder).maybe_load(Loop(resumed)) == 1
    train(resumed, 3, 4)
    assert resumed.agreements == 2  # nothing was broadcast
    assert_alike(optimizer, resumed)


def test_snapshots_of_trainers_have_the_whole_state(naive, folder):
    found = []
    for seed in 0, 1:  # the second trainer loads what the first one saved
        optimizer = make(naive, seed=seed)
        examples = list(batch(0, 0)) * 2
        trainer = trainer_over(examples, 2, optimizer, (3, "iteration"), folder)
        snapshot = multi_node_snapshot(naive, extensions.snapshot(autoload=True), [])
        trainer.extend(snapshot, trigger=(3, "iteration"))
        trainer.run()
        found.append((whole_state(optimizer), parameter_bits(optimizer.target)))
    assert found[0] == found[1]


def test_a_save_without_some_of_the_ranks_is_refused(naive, own_rank, folder):
    optimizer = train(make(naive), 0)
    checkpointer = make_checkpointer(own_rank, folder / f"{naive.rank}")
    if naive.size == 1:
        checkpointer.save(Loop(optimizer))
        assert checkpointer.maybe_load(Loop(optimizer)) == 1
        return
    with pytest.raises(ValueError, match="all ranks of the optimizer's communicator"):
        checkpointer.save(Loop(optimizer))


# What it takes.


@pytest.mark.sizes(2, 3, 4)
def test_an_update_meets_the_others_three_times():
    """When gradients are there, when hooks have succeeded, and when all have stepped."""
    with written_down("flat") as (comm, calls):
        optimizer = train(make(comm), 0, 1)
        calls.clear()
        train(optimizer, 2)
        assert [call.is_agreement for call in calls] == [True] * 3
        optimizer.finalize()


def share_of_file(array):
    """This process's share, in bytes, of the file in which an array lies."""
    address = array.ctypes.data
    shares = Counter()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"(\w+)-(\w+) \S+ \S+ \S+ (\d+)", line):
            begin, end = [int(text, 16) for text in mapping.groups()[:2]]
            file = mapping[3]
            if begin <= address < end:
                wanted = file
        elif line.startswith("Pss:"):
            shares[file] += 1024 * int(line.split()[1])
    return shares[wanted]


def test_a_machine_has_parameters_once_and_states_in_parts(naive):
    model = L.Linear(1000, 500)
    adam = create_multi_node_optimizer(optimizers.Adam(), naive, sharded=True)
    adam.setup(model)
    for _ in range(3):
        adam.update(lambda: F.sum(model(np.ones((2, 1000), "f"))))
    once = model.W.array.nbytes
    shares = naive.allgather_obj(share_of_file(model.W.array))
    assert sum(shares) < (1.1 + naive.size) * once  # with the gradients of each rank
    parts = [
        value.nbytes
        for shard in adam._updates.exchange._shards
        for value in shard.state.values()
    ]
    assert sum(parts) < 2.1 * once / naive.size
    adam.finalize()


# Values that travel to other machines while the next forward computes.


@pytest.fixture
def machines(naive, monkeypatch):
    """Ranks on two machines; each parameter goes by itself."""
    monkeypatch.setattr(f"{EXCHANGES}.buckets.BUCKET_BYTES", 4)
    comm = on_nodes([0, 1, 0, 1][: naive.size])
    yield comm
    comm.finalize()


@pytest.mark.sizes(2, 3, 4)
def test_reading_a_parameter_waits_for_its_own_values_alone(machines, monkeypatch):
    optimizer = train(make(machines), 0)
    net = optimizer.target
    parameter_bits(net)  # so that all values have come
    exchange = optimizer._updates.exchange.channel.alltoall
    may_go_on = threading.Event()
    num_sent = count()

    def hold_the_second(sent):
        if next(num_sent) == 1:
            assert may_go_on.wait(60)
        return exchange(sent)

    monkeypatch.setattr(
        optimizer._updates.exchange.channel, "alltoall", hold_the_second
    )
    train(optimizer, 1)
    read = [net.first.W.array.copy()]
    reader = threading.Thread(target=lambda: read.append(net.first.b.array.copy()))
    reader.start()
    reader.join(0.2)
    assert reader.is_alive()
    may_go_on.set()
    reader.join(60)
    expected = train(make(machines, sharded=False), 0, 1)
    for array, param in zip(read, (net.first.W, net.first.b), strict=True):
        np.testing.assert_array_equal(array, param.array)
    assert_alike(optimizer, expected)


@pytest.mark.sizes(2, 3, 4)
def test_values_that_fail_to_travel_raise_until_ranks_synchronize(
    machines, monkeypatch
):
    optimizer = train(make(machines, optimizers.MomentumSGD), 0)
    channel = optimizer._updates.exchange.channel
    exchange = channel.alltoall
    parameter_bits(optimizer.target)  # so that all values have come
    error = PeerError
    if machines.rank == 1:
        error = TypeError
    with monkeypatch.context() as patch:
        if machines.rank == 1:
            patch.setattr(channel, "alltoall", lambda sent: exchange([None, *sent[1:]]))
        train(optimizer, 1)
        for fail in (
            lambda: optimizer.target.first.W.array,
            lambda: whole_state(optimizer),  # as for a checkpoint
            lambda: train(optimizer, 2),
            lambda: train(optimizer, 3),
        ):
            with pytest.raises(error):
                fail()
    optimizer.synchronize()
    train(optimizer, 4, 5)
    assert optimizer.t == 4  # of 0, 1, 4 and 5
    bits = whole_state(optimizer)
    assert machines.allgather_obj(bits).count(bits) == machines.size
    assert same_everywhere(machines, optimizer.target)


def let_values_be_late(optimizer, monkeypatch):
    parameter_bits(optimizer.target)  # so that all values have come
    channel = optimizer._updates.exchange.channel
    exchange = channel.alltoall

    def late(sent):
        time.sleep(0.03)
        return exchange(sent)

    monkeypatch.setattr(channel, "alltoall", late)


def write_one_by_one(optimizer):
    for param in optimizer.target.params():
        param.array[...] = param.array.clip(-0.1, 0.1)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("change", [write_one_by_one, *BETWEEN])
def test_users_may_change_all_while_values_travel(machines, monkeypatch, change):
    made = []
    for sharded in True, False:
        optimizer = train(make(machines, sharded=sharded), 0)
        if sharded:
            let_values_be_late(optimizer, monkeypatch)
        train(optimizer, 1)
        optimizer = change(optimizer) or optimizer
        made.append(train(optimizer, 2, 3))
    assert_alike(*made)


@pytest.mark.sizes(2, 3, 4)
def test_copies_that_share_arrays_wait_for_values(machines, monkeypatch):
    optimizer = train(make(machines), 0)
    twin = optimizer.target.copy()
    let_values_be_late(optimizer, monkeypatch)
    train(optimizer, 1)
    assert parameter_bits(twin) == parameter_bits(optimizer.target)
    assert_alike(optimizer, train(make(machines, sharded=False), 0, 1))


@pytest.mark.sizes(2, 3, 4)
def test_a_fork_waits_for_values(machines, monkeypatch):
    """The new process has no thread in which they could come."""
    optimizer = train(make(machines), 0)
    let_values_be_late(optimizer, monkeypatch)
    train(optimizer, 1)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a wait
        parameter_bits(optimizer.target)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_two_parameters_of_one_array_are_refused(naive):
    net = Net(0)
    net.second.b.array = net.first.b.array
    optimizer = create_multi_node_optimizer(optimizers.SGD(), naive, sharded=True)
    with pytest.raises(ValueError, match=r"/second/b has the same array as /first/b"):
        train(optimizer.setup(net), 0, 1)


@pytest.mark.sizes(2, 3, 4)
def test_values_travel_within_the_step_without_overlap(machines, monkeypatch):
    monkeypatch.delattr("chainermn_train.background_thread.BackgroundThread.start")
    optimizer = train(make(machines, overlap=False), 0, 1)
    assert_alike(optimizer, train(make(machines, sharded=False), 0, 1))


@pytest.mark.sizes(2, 3, 4)
def test_an_optimizer_goes_on_after_its_channel_was_freed(machines):
    optimizer = train(make(machines), 0, 1)
    optimizer.finalize()
    expected = train(make(machines, sharded=False), 0, 1, 2)
    assert_alike(train(optimizer, 2), expected)


# What fails on one rank.


class Failing(float):
    """A hook's rate that fails when it is used, once."""

    def __init__(self):
        self.is_used = False

    def __rmul__(self, other):
        return self * other

    def __mul__(self, other):
        if self.is_used:
            return other * 0
        self.is_used = True
        raise OSError("planted")


@pytest.mark.sizes(2, 3, 4)
def test_a_hook_that_fails_on_one_rank_leaves_all_as_they_were(comm):
    optimizer = train(make(comm, optimizers.MomentumSGD), 0, 1)
    before = whole_state(optimizer), parameter_bits(optimizer.target)
    rate = 0.0
    if comm.rank == 1:
        rate = Failing()
    optimizer.add_hook(hooks.WeightDecay(rate))
    error = OSError if comm.rank == 1 else PeerError
    with pytest.raises(error, match="planted"):
        train(optimizer, 2)
    assert (whole_state(optimizer), parameter_bits(optimizer.target)) == before
    expected = train(make(comm, optimizers.MomentumSGD, False), 0, 1, 3)
    assert_alike(train(optimizer, 3), expected)


@pytest.mark.sizes(2, 3, 4)
def test_memory_that_fails_on_one_rank_leaves_all_as_they_were(comm, monkeypatch):
    """As pages can't be dropped by a process that has locked its memory."""
    optimizer = make(comm, optimizers.MomentumSGD)
    error = PeerError
    with monkeypatch.context() as patched:
        if comm.rank == 1:
            error = AttributeError
            patched.delattr(f"{PARAMETER_FILE}.ParameterFile.drop_own_writes")
        with pytest.raises(error, match="drop_own_writes"):
            train(optimizer, 0)
    expected = train(make(comm, optimizers.MomentumSGD, False), 1, 2)
    assert_alike(train(optimizer, 1, 2), expected)


@pytest.mark.sizes(2, 3, 4)
def test_a_rule_that_fails_on_one_rank_is_made_good_by_rank_0s_state(comm):
    optimizer = train(make(comm, optimizers.MomentumSGD), 0, 1)
    rate = 0.0
    if comm.rank == 1:
        rate = Failing()
    rule = optimizer.target.first.b.update_rule
    rule.add_hook(hooks.WeightDecay(rate))
    error = OSError if comm.rank == 1 else PeerError
    with pytest.raises(error, match="planted"):
        train(optimizer, 2)
    rule.remove_hook("WeightDecay")
    train(optimizer, 3, 4)
    assert optimizer.t == 4  # rank 0 has counted the update that failed
    bits = whole_state(optimizer)
    assert comm.allgather_obj(bits).count(bits) == comm.size
    assert same_everywhere(comm, optimizer.target)
