"""ThroughputReport tells all ranks how fast they train, and what the time goes to."""

from __future__ import annotations

import chainer
import numpy as np
import pytest

from chainermn_comm import PeerError
from chainermn_train import DistributedOrderSampler
from chainermn_train.extensions import ThroughputReport
from tests.support.doubles.simulated_time import SimulatedCommunicator, SimulatedTime
from tests.support.training.iterators import serial, threads
from tests.support.training.linear import ScaledMean
from tests.support.training.trainers import logged

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


def report_of(entry):
    return {key: entry[f"throughput/{key}"] for key in KEYS}


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
    slow, size = comm.size - 1, comm.size
    model = Model(lambda: time.sleep(3 if comm.rank == slow else 1))
    trainer = trainer_for(comm, (1, "epoch"), ThroughputReport(comm), model=model)
    trainer.extend(
        lambda _: time.sleep(100), name="evaluation", trigger=(1, "iteration")
    )
    waiting = (size - 1) / size * 2 / 3.5
    expected = [2 * size / 3.5, 3.5, 1 - waiting - 0.5 / 3.5, waiting, 0.5 / 3.5, slow]
    (report,) = [report_of(entry) for entry in logged(trainer, (1, "epoch"))]
    assert list(report.values()) == pytest.approx(expected)
    assert comm.allgather_obj(report) == [report] * size
    line = (
        f"epoch 1, iteration 3: {2 * size / 3.5:.1f} examples/s on {size} ranks; a step takes "
        f"3,500.0 ms: {100 * expected[2]:.0f} % computing, {100 * waiting:.0f} % waiting, 14 % on "
        f"the wire; slowest: rank {slow}, which computes {3 * size / (size + 2):.2f} times the "
        "mean\n"
    )
    assert capsys.readouterr().out == (line if comm.rank == 0 else "")


@pytest.mark.parametrize("kind", [serial, threads])
@pytest.mark.parametrize("left_over", [0, 1])
def test_examples_of_a_shared_order_are_counted_once(
    simulated, trainer_for, kind, left_over
):
    """Each rank has its part of the epoch, though the data set is everybody's."""
    comm, time = simulated
    report = ThroughputReport(comm)
    trainer = trainer_for(comm, (7, "iteration"), model=Model(lambda: time.sleep(1)))
    trainer.extend(report, trigger=(3, "iteration"))
    examples = np.ones(6 * comm.size + left_over, np.float32)
    sampler = DistributedOrderSampler(comm, drop_last=True)
    iterator = kind(examples, 2, order_sampler=sampler)
    optimizer = trainer.updater.get_optimizer("main")
    trainer.updater = chainer.training.StandardUpdater(iterator, optimizer)
    log = logged(trainer, (3, "iteration"))
    rates = [entry["throughput/examples_per_second"] for entry in log]
    assert rates == pytest.approx([2 * comm.size / 1.5] * 2)


def test_a_resumed_training_reports_on_what_was_done_since(
    simulated, trainer_for, tmp_path
):
    comm, time = simulated

    def build(stop):
        trainer = trainer_for(
            comm, (stop, "iteration"), model=Model(lambda: time.sleep(1))
        )
        trainer.extend(ThroughputReport(comm), trigger=(2, "iteration"))
        return trainer

    first, second = build(3), build(6)
    first.run()
    chainer.serializers.save_npz(tmp_path / "at_3.npz", first)
    chainer.serializers.load_npz(tmp_path / "at_3.npz", second)
    log = logged(second, (2, "iteration"))
    assert [entry["iteration"] for entry in log] == [4, 6]
    for entry in log:  # the first of one step, the second of two
        assert entry["throughput/seconds_per_step"] == pytest.approx(1.5)
        rate = entry["throughput/examples_per_second"]
        assert rate == pytest.approx(2 * comm.size / 1.5)


def test_the_trainer_s_parts_are_forwarded_to_and_given_back(comm, trainer_for):
    trainer = trainer_for(comm, (4, "iteration"))
    updater = trainer.updater
    trainer.extend(ThroughputReport(comm), trigger=(2, "iteration"))

    def look(trainer):
        assert trainer.updater is not updater
        assert trainer.updater.get_iterator("main") is updater.get_iterator("main")
        trainer.updater.mark = trainer.updater.iteration
        if updater.mark == 3:
            raise ZeroDivisionError

    trainer.extend(look, trigger=(1, "iteration"))
    with pytest.raises(ZeroDivisionError):
        trainer.run(show_loop_exception_msg=False)
    assert trainer.updater is updater
    assert updater.mark == 3


@pytest.mark.sizes(2, 3, 4)
def test_a_trainer_that_can_not_be_timed_is_told(comm, trainer_for, tmp_path):
    """On all ranks, where it is wrong on one."""
    trainer = trainer_for(comm, (1, "epoch"), ThroughputReport(comm))
    if comm.rank == 1:
        trainer.updater.get_iterator("main").dataset = None
    error = TypeError if comm.rank == 1 else PeerError
    with pytest.raises(error, match="has no data set"):
        trainer.run()
    trainer = trainer_for(comm, (1, "epoch"), ThroughputReport(comm))
    single = chainer.optimizers.SGD().setup(ScaledMean())
    iterator = trainer.updater.get_iterator("main")
    trainer.updater = chainer.training.StandardUpdater(iterator, single)
    with pytest.raises(TypeError, match="needs an updater with a multi-node optimizer"):
        trainer.run()
    reports = [ThroughputReport(comm) for _ in range(2)]
    trainer = trainer_for(comm, (1, "epoch"), *reports)
    with pytest.raises(ValueError, match="takes one ThroughputReport"):
        trainer.run()
