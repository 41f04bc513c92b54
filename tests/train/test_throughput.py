"""ThroughputReport tells all ranks how fast they train, and what the time goes to."""

from __future__ import annotations

import copy
import re
import threading
import time

import chainer
import numpy as np
import pytest
from chainer.training import extensions

from chainermn_comm import PeerError
from chainermn_train import create_multi_node_optimizer, timing
from chainermn_train.extensions import ThroughputReport

pytestmark = pytest.mark.world

EXAMPLES = np.arange(6, dtype=np.float32)
KEYS = ["examples_per_second", "seconds_per_step", "computing", "waiting", "wire", "slowest_rank"]


class Model(chainer.Chain):
    """Sleeps before it computes its loss."""

    def __init__(self, seconds=0.0):
        super().__init__()
        self.seconds = seconds
        with self.init_scope():
            self.w = chainer.Parameter(np.ones((), np.float32))

    def __call__(self, x):
        time.sleep(self.seconds)
        return chainer.functions.mean(x * chainer.functions.broadcast_to(self.w, x.shape))


def report_of(entry):
    return {key: entry[f"throughput/{key}"] for key in KEYS if f"throughput/{key}" in entry}


def test_an_epoch_gives_a_line_and_the_same_observations_on_all_ranks(comm, trainer_for, capsys):
    trainer = trainer_for(comm, Model(), EXAMPLES, (2, "epoch"))
    trainer.extend(ThroughputReport(comm))
    log = extensions.LogReport()
    trainer.extend(log)
    start = time.perf_counter()
    trainer.run()
    seconds = max(comm.allgather_obj(time.perf_counter() - start))
    assert len(log.log) == 2
    for entry in log.log:
        report = report_of(entry)
        assert list(report) == KEYS
        assert report["computing"] + report["waiting"] + report["wire"] == pytest.approx(1)
        assert min(report.values()) >= 0
        assert report["examples_per_second"] > 2 * 6 * comm.size / seconds / 2
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


@pytest.mark.sizes(2, 3, 4)
def test_the_slowest_rank_is_named_and_the_others_wait_for_it(comm, trainer_for):
    slow = comm.size - 1
    trainer = trainer_for(comm, Model(0.1 if comm.rank == slow else 0.0), EXAMPLES, (2, "epoch"))
    report = ThroughputReport(comm)
    trainer.extend(report)
    log = extensions.LogReport()
    trainer.extend(log)
    shares = []

    @chainer.training.make_extension(trigger=(6, "iteration"), priority=1000)
    def keep(_):
        clock = report._clock
        shares.append((clock.waiting / clock.sampled, clock.wire / clock.sampled))

    trainer.extend(keep)
    trainer.run()
    entry = report_of(log.log[-1])  # of the second epoch: no parameters are broadcast in it
    assert entry["slowest_rank"] == slow
    assert entry["seconds_per_step"] > 0.1
    ((waiting, wire),) = shares
    # The sleep is the one part whose length is known: the others wait for all of it.
    others = [each for rank, each in enumerate(comm.allgather_obj(waiting)) if rank != slow]
    own = comm.allgather_obj(waiting)[slow]
    assert min(others) > own
    assert wire < 1


def test_time_in_other_extensions_is_not_training(comm, trainer_for):
    trainer = trainer_for(comm, Model(), EXAMPLES, (1, "epoch"))
    report = ThroughputReport(comm)
    trainer.extend(report)
    log = extensions.LogReport()
    trainer.extend(log)
    start = time.perf_counter()
    trainer.extend(lambda _: time.sleep(0.2), name="evaluation")
    trainer.run()
    seconds = time.perf_counter() - start
    assert 3 * report_of(log.log[0])["seconds_per_step"] < seconds - 0.4


def test_examples_are_counted_exactly_on_ranks_with_uneven_data(comm, trainer_for):
    """One rank has no examples at all."""
    mine = EXAMPLES[: 6 if comm.rank == 0 else 0]

    class Updater(chainer.training.StandardUpdater):
        epoch_detail = property(lambda self: self.iteration / 3)

        def update_core(self):
            self.get_optimizer("main").target.cleargrads()
            self.get_optimizer("main").update()

    model = Model()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
    updater = Updater(chainer.iterators.SerialIterator(mine, 2), optimizer)
    trainer = chainer.training.Trainer(updater, (6, "iteration"))
    counted = []
    report = ThroughputReport(comm)
    trainer.extend(report)

    @chainer.training.make_extension(trigger=(3, "iteration"), priority=1000)
    def count(trainer):
        seconds = max(comm.allgather_obj(report._clock.seconds))
        counted.append((seconds, report))

    trainer.extend(count)
    rates = []
    trainer.extend(
        lambda t: rates.append(t.observation["throughput/examples_per_second"]),
        name="rates",
        trigger=(3, "iteration"),
    )
    trainer.run()
    np.testing.assert_allclose(rates, [6 / seconds for seconds, _ in counted], rtol=1e-9)


def test_the_trainer_s_parts_are_forwarded_to_and_given_back(comm, trainer_for, tmp_path):
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

    trainer.extend(look)
    trainer.run()
    assert seen == [1, 2, 3, 4]
    assert updater.mark == 5
    assert trainer.updater is updater
    assert vars(comm).keys() == attributes


def test_a_resumed_training_reports_on_what_was_done_since(comm, trainer_for, tmp_path):
    def build(stop):
        trainer = trainer_for(comm, Model(), EXAMPLES, stop)
        trainer.extend(ThroughputReport(comm), trigger=(2, "iteration"))
        log = extensions.LogReport(trigger=(2, "iteration"))
        trainer.extend(log)
        return trainer, log

    first, _ = build((3, "iteration"))
    first.run()
    chainer.serializers.save_npz(tmp_path / "at_3.npz", first)
    second, log = build((6, "iteration"))
    chainer.serializers.load_npz(tmp_path / "at_3.npz", second)
    clock = second.get_extension("throughput")._clock
    second.run()
    assert second.get_extension("throughput")._clock is not clock
    reports = [report_of(entry) for entry in log.log]
    assert [entry["iteration"] for entry in log.log] == [2, 4, 6]
    assert all(list(report) == KEYS for report in reports)
    # One step of two examples was done since; had the others been counted, there'd be more.
    counted = reports[1]["examples_per_second"] * reports[1]["seconds_per_step"]
    assert counted <= 2 * comm.size * (1 + 1e-9)


def test_parts_are_given_back_after_an_error(naive, trainer_for):
    trainer = trainer_for(naive, Model(), EXAMPLES, (4, "iteration"))
    updater = trainer.updater
    attributes = set(vars(naive))
    trainer.extend(ThroughputReport(naive))

    def fails(trainer):
        raise ZeroDivisionError

    trainer.extend(fails)
    with pytest.raises(ZeroDivisionError):
        trainer.run(show_loop_exception_msg=False)
    assert trainer.updater is updater
    assert vars(naive).keys() == attributes


def test_training_is_the_same_with_it(comm, trainer_for):
    weights = []
    for timed in (False, True):
        model = Model()
        trainer = trainer_for(comm, model, EXAMPLES + comm.rank, (2, "epoch"))
        if timed:
            trainer.extend(ThroughputReport(comm))
        trainer.run()
        weights.append(float(model.w.array))
    assert weights[0] == weights[1] != 1


def test_a_trainer_that_can_not_be_timed_is_told(naive, trainer_for):
    model = Model()
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(EXAMPLES, 2), chainer.optimizers.SGD().setup(model)
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


def test_two_reports_at_a_time_see_the_same_steps(naive, trainer_for):
    trainer = trainer_for(naive, Model(0.01), EXAMPLES, (1, "epoch"))
    trainer.extend(ThroughputReport(naive))
    trainer.extend(ThroughputReport(naive), name="again", trigger=(3, "iteration"))
    log = extensions.LogReport()
    trainer.extend(log)
    trainer.run()
    assert "allreduce" not in vars(naive)
    for key in "seconds_per_step", "waiting", "wire":
        first, second = log.log[0][f"throughput/{key}"], log.log[0][f"again/{key}"]
        assert first > 0
        assert second == pytest.approx(first, rel=0.2, abs=0.01)


class Kernels:
    """Stands in for a GPU: counts how often somebody waits for its kernels."""

    def __init__(self):
        self.waits = 0

    def __call__(self):
        self.waits += 1


def test_on_a_gpu_only_some_steps_wait_for_kernels():
    kernels = Kernels()
    clock = timing.StepClock(kernels)
    for _ in range(timing.STEPS_PER_SAMPLE_ON_GPU + 1):
        with clock.step(), timing.part("waiting"):
            time.sleep(0.001)
    assert kernels.waits == 2 * 4  # before and after a step, and its collective
    assert clock.steps == timing.STEPS_PER_SAMPLE_ON_GPU + 1
    assert 0.002 <= clock.waiting <= clock.sampled < clock.seconds


def test_what_another_thread_sends_is_no_part_of_the_step():
    clock = timing.StepClock()

    def send():
        with timing.part("wire"), timing.part("waiting"):  # what is within counts once
            time.sleep(0.01)

    with clock.step():
        thread = threading.Thread(target=send)
        thread.start()
        thread.join()
        assert clock.wire == 0
        send()
    assert 0.01 <= clock.wire < clock.seconds
    assert clock.waiting == 0
    before = clock.wire
    send()  # outside a step
    assert clock.wire == before
