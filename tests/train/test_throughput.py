"""ThroughputReport tells all ranks how fast they train, and what the time goes to."""

from __future__ import annotations

import numpy as np
import pytest
from chainer.optimizers import SGD
from chainer.serializers import load_npz, save_npz
from chainer.training import StandardUpdater

from chainermn_comm import PeerError
from chainermn_train import DistributedOrderSampler
from chainermn_train.extensions import ThroughputReport
from tests.support.training.small_models import ScaledMean
from tests.support.training.trainers import SimulatedTime, logged, serial, threads
from tests.support.worlds.third_party import PlainCommunicator

pytestmark = pytest.mark.world

KEYS = [
    "examples_per_second",
    "seconds_per_step",
    "computing",
    "waiting",
    "wire",
    "slowest_rank",
]


class Model(ScaledMean):
    """Calls `before` before it computes its loss."""

    def __init__(self, before):
        super().__init__()
        self.before = before

    def __call__(self, x):
        self.before()
        return super().__call__(x)


class SimulatedCommunicator(PlainCommunicator):
    """A handshake ends when the last rank has come to it; a mean of gradients takes long."""

    def __init__(self, mpi, time, seconds):
        super().__init__(mpi)
        self.time = time
        self.seconds = seconds

    def handshake(self, *arguments, **options):
        payloads = super().handshake(*arguments, **options)
        self.time.now = max(self.mpi.allgather(self.time.now))
        return payloads

    def multi_node_mean_grad(self, model, zero_fill=False):
        super().multi_node_mean_grad(model, zero_fill)
        self.time.sleep(self.seconds)


@pytest.fixture
def simulated(monkeypatch, world):
    """A communicator and this rank's time, in which a mean of gradients takes half a second."""
    time = SimulatedTime()
    monkeypatch.setattr("time.perf_counter", time)
    return SimulatedCommunicator(world, time, 0.5), time


@pytest.mark.sizes(2, 3, 4)
def test_all_ranks_observe_the_same_and_one_names_the_slowest(
    simulated, trainer_for, capsys
):
    """The last rank computes for 3 s, the others for 1 s; what else is done is no part of it."""
    comm, time = simulated
    size = comm.size

    def compute():
        time.sleep(3 if comm.rank == size - 1 else 1)

    model = Model(compute)
    trainer = trainer_for(comm, (1, "epoch"), ThroughputReport(comm), model=model)
    trainer.extend(
        lambda _: time.sleep(100), name="evaluation", trigger=(1, "iteration")
    )
    rate = 2 * size / 3.5
    waiting = (size - 1) / size * 2 / 3.5
    computing = 1 - waiting - 0.5 / 3.5
    expected = [rate, 3.5, computing, waiting, 0.5 / 3.5, size - 1]
    (entry,) = logged(trainer, (1, "epoch"))
    found = [entry[f"throughput/{key}"] for key in KEYS]
    assert found == pytest.approx(expected)
    line = ""
    if comm.rank == 0:
        line = (
            f"epoch 1, iteration 3: {rate:.1f} examples/s on {size} ranks; a step takes "
            f"3,500.0 ms: {computing:.0%} computing, {waiting:.0%} waiting, 14% on the wire; "
            f"slowest: rank {size - 1}, which computes {3 * size / (size + 2):.2f} times the "
            "mean\n"
        )
    assert capsys.readouterr().out == line


@pytest.mark.parametrize("kind", [serial, threads])
def test_a_resumed_training_reports_on_what_was_done_since(
    simulated, trainer_for, tmp_path, kind
):
    """Each rank has its part of an epoch here, though the data set is everybody's."""
    comm, time = simulated
    examples = np.ones(6 * comm.size + 1, np.float32)

    def build(stop):
        model = Model(lambda: time.sleep(1))
        trainer = trainer_for(comm, (stop, "iteration"), model=model)
        trainer.extend(ThroughputReport(comm), trigger=(2, "iteration"))
        sampler = DistributedOrderSampler(comm, drop_last=True)
        iterator = kind(examples, 2, order_sampler=sampler)
        optimizer = trainer.updater.get_optimizer("main")
        trainer.updater = StandardUpdater(iterator, optimizer)
        return trainer

    first = build(3)
    second = build(6)
    first.run()
    save_npz(tmp_path / "at_3.npz", first)
    load_npz(tmp_path / "at_3.npz", second)
    log = logged(second, (2, "iteration"))
    assert [entry["iteration"] for entry in log] == [4, 6]
    for entry in log:  # the first of one step, the second of two
        assert entry["throughput/seconds_per_step"] == pytest.approx(1.5)
        rate = entry["throughput/examples_per_second"]
        assert rate == pytest.approx(2 * comm.size / 1.5)


def test_the_trainer_s_updater_is_given_back(comm, trainer_for):
    def look(trainer):
        assert trainer.updater is not updater
        raise ZeroDivisionError

    report = ThroughputReport(comm)
    trainer = trainer_for(comm, (4, "iteration"), report)
    trainer.extend(look, trigger=(1, "iteration"))
    updater = trainer.updater
    with pytest.raises(ZeroDivisionError):
        trainer.run(show_loop_exception_msg=False)
    assert trainer.updater is updater


@pytest.mark.sizes(2, 3, 4)
def test_a_trainer_that_can_not_be_timed_is_told(comm, trainer_for):
    """On all ranks, where it is wrong on one."""
    report = ThroughputReport(comm)
    trainers = [
        trainer_for(comm, (1, "epoch"), report),
        trainer_for(comm, (1, "epoch"), report),
        trainer_for(comm, (1, "epoch"), report, ThroughputReport(comm)),
    ]
    iterators = [trainer.updater.get_iterator("main") for trainer in trainers]
    if comm.rank == 1:
        iterators[0].dataset = None
    single = SGD().setup(ScaledMean())
    trainers[1].updater = StandardUpdater(iterators[1], single)
    texts = [
        "has no data set",
        "needs an updater with a multi-node optimizer",
        "takes one ThroughputReport",
    ]
    for trainer, text in zip(trainers, texts, strict=True):
        with pytest.raises((TypeError, ValueError, PeerError), match=text):
            trainer.run()
