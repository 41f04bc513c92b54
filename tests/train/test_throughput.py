"""ThroughputReport tells all ranks how fast they train, and what the time goes to."""

from __future__ import annotations

import copy
import re

import chainer
import numpy as np
import pytest
from chainer.training import extensions

from chainermn_comm import PeerError
from chainermn_train import create_multi_node_optimizer
from chainermn_train.extensions import ThroughputReport
from tests.support.linear import ScaledMean
from tests.support.simulated_time import SimulatedCommunicator, SimulatedTime

pytestmark = pytest.mark.world

EXAMPLES = np.arange(6, dtype=np.float32)
KEYS = ["examples_per_second", "seconds_per_step", "computing", "waiting", "wire", "slowest_rank"]


class Model(ScaledMean):
    """Calls `before` before it computes its loss."""

    def __init__(self, before=lambda: None):
        super().__init__()
        self.before = before

    def __call__(self, x):
        self.before()
        return super().__call__(x)


def report_of(entry, name="throughput"):
    return {key: entry[f"{name}/{key}"] for key in KEYS if f"{name}/{key}" in entry}


def test_an_epoch_gives_a_line_and_the_same_observations_on_all_ranks(comm, trainer_for, capsys):
    trainer = trainer_for(comm, Model(), EXAMPLES, (2, "epoch"))
    trainer.extend(ThroughputReport(comm))
    log = extensions.LogReport()
    trainer.extend(log)
    trainer.run()
    assert len(log.log) == 2
    for entry in log.log:
        report = report_of(entry)
        assert list(report) == KEYS
        assert report["computing"] + report["waiting"] + report["wire"] == pytest.approx(1)
        assert min(report.values()) >= 0
        assert comm.allgather_obj(report) == [report] * comm.size
    lines = capsys.readouterr().out.splitlines()
    pattern = (
        rf"epoch \d, iteration \d+: [\d,.]+ examples/s on {comm.size} ranks; a step takes "
        r"[\d,.]+ ms: \d+ % computing, \d+ % waiting, \d+ % on the wire; "
        r"slowest: rank \d, which computes [\d.]+ times the mean"
    )
    if comm.rank == 0:
        assert [line[:22] for line in lines] == ["epoch 1, iteration 3: ", "epoch 2, iteration 6: "]
        assert all(re.fullmatch(pattern, line) for line in lines)
    else:
        assert lines == []


@pytest.fixture
def simulated(monkeypatch, world):
    """A communicator and this rank's time, in which a mean of gradients takes half a second."""
    time = SimulatedTime()
    monkeypatch.setattr("time.perf_counter", time)
    return SimulatedCommunicator(world, time, 0.5), time


@pytest.mark.sizes(2, 3, 4)
def test_the_slowest_rank_is_named_and_the_others_wait_for_it(simulated, trainer_for, capsys):
    """The last rank computes for 3 s, the others for 1 s; what else is done is no part of it."""
    comm, time = simulated
    slow, size = comm.size - 1, comm.size
    model = Model(lambda: time.sleep(3 if comm.rank == slow else 1))
    trainer = trainer_for(comm, model, EXAMPLES, (2, "epoch"))
    trainer.extend(ThroughputReport(comm))
    trainer.extend(ThroughputReport(comm), name="again", trigger=(3, "iteration"))
    trainer.extend(lambda _: time.sleep(100), name="evaluation", trigger=(1, "iteration"))
    log = extensions.LogReport()
    trainer.extend(log)
    trainer.run()
    waiting = (size - 1) / size * 2 / 3.5
    expected = [2 * size / 3.5, 3.5, 1 - waiting - 0.5 / 3.5, waiting, 0.5 / 3.5, slow]
    for entry in log.log:
        for name in "throughput", "again":
            assert list(report_of(entry, name).values()) == pytest.approx(expected)
    lines = capsys.readouterr().out.splitlines()
    text = f"slowest: rank {slow}, which computes {3 * size / (size + 2):.2f} times the mean"
    assert [text in line for line in lines] == ([True] * 4 if comm.rank == 0 else [])


def test_examples_are_counted_exactly_on_ranks_with_uneven_data(simulated):
    """Only rank 0 has examples."""
    comm, time = simulated
    mine = EXAMPLES[: 6 if comm.rank == 0 else 0]

    class Updater(chainer.training.StandardUpdater):
        epoch_detail = property(lambda self: self.iteration / 3)

        def update_core(self):
            time.sleep(1)
            self.get_optimizer("main").target.cleargrads()
            self.get_optimizer("main").update()

    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(Model())
    optimizer.assume_synchronized()
    updater = Updater(chainer.iterators.SerialIterator(mine, 2), optimizer)
    trainer = chainer.training.Trainer(updater, (6, "iteration"))
    trainer.extend(ThroughputReport(comm))
    rates = []
    trainer.extend(
        lambda t: rates.append(t.observation["throughput/examples_per_second"]),
        name="rates",
        trigger=(3, "iteration"),
    )
    trainer.run()
    assert rates == [6 / 4.5, 6 / 4.5]


def test_a_resumed_training_reports_on_what_was_done_since(simulated, trainer_for, tmp_path):
    comm, time = simulated

    def build(stop):
        trainer = trainer_for(comm, Model(lambda: time.sleep(1)), EXAMPLES, stop)
        trainer.extend(ThroughputReport(comm), trigger=(2, "iteration"))
        log = extensions.LogReport(trigger=(2, "iteration"))
        trainer.extend(log)
        return trainer, log

    first, _ = build((3, "iteration"))
    first.run()
    chainer.serializers.save_npz(tmp_path / "at_3.npz", first)
    second, log = build((6, "iteration"))
    chainer.serializers.load_npz(tmp_path / "at_3.npz", second)
    second.run()
    assert [entry["iteration"] for entry in log.log] == [2, 4, 6]
    for entry in log.log[1:]:  # the first of one step, the second of two
        report = report_of(entry)
        assert list(report) == KEYS
        assert report["seconds_per_step"] == pytest.approx(1.5)
        assert report["examples_per_second"] == pytest.approx(2 * comm.size / 1.5)


def test_the_trainer_s_parts_are_forwarded_to_and_given_back(comm, trainer_for):
    trainer = trainer_for(comm, Model(), EXAMPLES, (4, "iteration"))
    updater = trainer.updater
    optimizer = updater.get_optimizer("main")
    attributes = set(vars(comm))
    trainer.extend(ThroughputReport(comm), trigger=(2, "iteration"))
    seen = []

    def look(trainer):
        assert trainer.updater is not updater
        assert trainer.updater.get_iterator("main") is updater.get_iterator("main")
        assert copy.deepcopy(optimizer).communicator is optimizer.communicator is comm
        seen.append(trainer.updater.iteration)
        trainer.updater.mark = 5
        if len(seen) == 3:
            raise ZeroDivisionError

    trainer.extend(look, trigger=(1, "iteration"))
    with pytest.raises(ZeroDivisionError):
        trainer.run(show_loop_exception_msg=False)
    assert seen == [1, 2, 3]
    assert updater.mark == 5
    assert trainer.updater is updater
    assert vars(comm).keys() == attributes


def test_training_is_the_same_with_it(comm, trainer_for):
    weights = []
    for timed in (False, True):
        model = Model()
        trainer = trainer_for(comm, model, EXAMPLES + comm.rank, (2, "epoch"))
        original = trainer.updater
        if timed:
            trainer.extend(ThroughputReport(comm))
        trainer.run()
        assert trainer.updater is original
        weights.append(float(model.w.array))
    assert weights[0] == weights[1] != 1


def test_a_trainer_that_can_not_be_timed_is_told(naive):
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(EXAMPLES, 2), chainer.optimizers.SGD().setup(Model())
    )
    trainer = chainer.training.Trainer(updater, (1, "epoch"))
    trainer.extend(ThroughputReport(naive))
    with pytest.raises(TypeError, match="needs an updater with a multi-node optimizer"):
        trainer.run()
    with pytest.raises(TypeError, match="ThroughputReport needs a communicator"):
        ThroughputReport(None)  # type: ignore[arg-type]


@pytest.mark.sizes(2, 3, 4)
def test_what_is_wrong_on_one_rank_is_told_on_all(comm, trainer_for):
    trainer = trainer_for(comm, Model(), EXAMPLES, (1, "epoch"))
    if comm.rank == 1:
        trainer.updater.get_iterator("main").dataset = None
    trainer.extend(ThroughputReport(comm))
    with pytest.raises(TypeError if comm.rank == 1 else PeerError, match="has no data set"):
        trainer.run()
