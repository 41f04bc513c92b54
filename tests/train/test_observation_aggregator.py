"""ObservationAggregator shows all ranks the same combination of what each observed."""

from __future__ import annotations

import copy
from typing import Any

import chainer
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions

from chainermn_comm import PeerError
from chainermn_train.extensions import ObservationAggregator
from tests.support.linear import ScaledMean

pytestmark = pytest.mark.world


class Model(ScaledMean):
    """Reports the mean of its inputs, also as a variable, and on odd ranks something else."""

    def __init__(self, rank=0):
        super().__init__()
        self.odd = rank % 2

    def __call__(self, x):
        chainer.report({"mean": x.mean()}, self)
        if self.odd:
            chainer.report({"odd": np.float16(7)}, self)
        return super().__call__(x)


def examples(comm, count=6):
    return np.arange(count, dtype=np.float32) + 10 * comm.rank


class FakeTrainer:
    """What an aggregator asks of a trainer, without the training."""

    def __init__(self, observation=None, iteration=1):
        self.observation = observation or {}
        self.updater = self
        self.iteration = iteration
        self.epoch_detail = iteration / 3


def test_every_rank_logs_the_mean_of_all_ranks(comm, trainer_for):
    trainer = trainer_for(comm, Model(), examples(comm), (2, "epoch"))
    trainer.extend(ObservationAggregator(comm, "main/mean"))
    trainer.extend(ObservationAggregator(comm, "main/loss", "loss"))
    log = extensions.LogReport(trigger=(1, "iteration"))
    trainer.extend(log)
    trainer.run()
    offset = 10 * (comm.size - 1) / 2
    expected = [start + 0.5 + offset for start in (0, 2, 4, 0, 2, 4)]
    np.testing.assert_allclose([entry["main/mean"] for entry in log.log], expected, rtol=1e-12)
    own = comm.allgather_obj([entry["main/loss"] for entry in log.log])  # under its own name
    np.testing.assert_allclose([entry["loss"] for entry in log.log], np.mean(own, axis=0))
    seen = [entry["main/mean"] for entry in log.log]
    assert comm.allgather_obj(seen) == [seen] * comm.size  # the same bits


def test_values_are_kept_until_the_trigger_fires_and_then_reduced_in_any_way(comm, trainer_for):
    trainer = trainer_for(comm, Model(), examples(comm), (2, "epoch"))
    calls = []

    def largest(values):
        calls.append(values)
        return max(max(each) for each in values)

    kwargs: Any = {"comm_trigger": (1, "epoch"), "aggregator": largest}
    trainer.extend(ObservationAggregator(comm, "main/mean", **kwargs))
    log = extensions.LogReport(trigger=(1, "iteration"))
    trainer.extend(log)
    trainer.run()
    assert [entry.get("main/mean") for entry in log.log] == [
        *(None, None, 4.5 + 10 * (comm.size - 1)),
        *(None, None, 4.5 + 10 * (comm.size - 1)),
    ]
    values = [[start + 0.5 + 10 * rank for start in (0, 2, 4)] for rank in range(comm.size)]
    assert calls == ([values, values] if comm.rank == 0 else [])


def test_a_value_that_some_ranks_observe_reaches_all_of_them(comm, trainer_for):
    trainer = trainer_for(comm, Model(comm.rank), examples(comm), (2, "iteration"))
    trainer.extend(ObservationAggregator(comm, "main/odd", "odd"))
    log = extensions.LogReport(trigger=(1, "iteration"))
    trainer.extend(log)
    trainer.run()
    assert [entry.get("odd") for entry in log.log] == [7.0 if comm.size > 1 else None] * 2
    assert ("main/odd" in log.log[0]) == bool(comm.rank % 2)


def test_the_mean_is_over_values_not_over_ranks(comm):
    aggregator = ObservationAggregator(comm, "x", comm_trigger=(3, "iteration"))
    for iteration in (1, 2, 3):
        observation = {"x": iteration} if iteration <= comm.rank + 1 else {}
        trainer = FakeTrainer(observation, iteration)
        aggregator(trainer)
    everything = [x for rank in range(comm.size) for x in (1, 2, 3)[: rank + 1]]
    assert trainer.observation == {"x": sum(everything) / len(everything)}


def test_arrays_are_combined_and_kept_as_they_were_observed(comm):
    aggregator = ObservationAggregator(comm, "x", comm_trigger=(2, "iteration"))
    array = np.array([1, 2], np.int8)
    aggregator(FakeTrainer({"x": array}, 1))
    array += 100
    trainer = FakeTrainer({"x": array}, 2)
    aggregator(trainer)
    np.testing.assert_array_equal(trainer.observation["x"], [51, 52])


def test_an_extension_added_earlier_with_lower_priority_reads_the_result(comm, trainer_for):
    trainer = trainer_for(comm, Model(), examples(comm), (1, "iteration"))
    seen = []
    trainer.extend(lambda t: seen.append(t.observation["main/mean"]), name="reader")
    trainer.extend(ObservationAggregator(comm, "main/mean"))
    trainer.run()
    assert seen == [0.5 + 10 * (comm.size - 1) / 2]


def test_a_resumed_training_reports_what_an_uninterrupted_one_does(comm, trainer_for, tmp_path):
    def build(stop):
        trainer = trainer_for(comm, Model(), examples(comm), stop)
        trainer.extend(ObservationAggregator(comm, "main/loss", comm_trigger=(4, "iteration")))
        log = extensions.LogReport(trigger=(1, "iteration"))
        trainer.extend(log, name="log")
        return trainer, log

    whole, log = build((8, "iteration"))
    whole.run()
    first, _ = build((6, "iteration"))
    first.run()
    chainer.serializers.save_npz(tmp_path / "snapshot.npz", first)
    second, resumed = build((8, "iteration"))
    chainer.serializers.load_npz(tmp_path / "snapshot.npz", second)
    second.run()
    expected = [entry.get("main/loss") for entry in log.log]
    assert [value is not None for value in expected] == 2 * [False, False, False, True]
    assert [entry.get("main/loss") for entry in resumed.log] == expected


def test_arrays_that_are_kept_survive_a_snapshot(comm, tmp_path):
    aggregator = ObservationAggregator(comm, "x", comm_trigger=(2, "iteration"))
    aggregator(FakeTrainer({"x": np.array([1.0, 2.0]) * comm.rank}, 1))
    chainer.serializers.save_npz(tmp_path / "state.npz", aggregator)
    other = ObservationAggregator(comm, "x", comm_trigger=(2, "iteration"))
    other(FakeTrainer({"x": 5.0}, 1))  # forgotten
    chainer.serializers.load_npz(tmp_path / "state.npz", other)
    trainer = FakeTrainer({}, 2)
    other(trainer)
    mean = (comm.size - 1) / 2
    np.testing.assert_array_equal(trainer.observation["x"], [mean, 2 * mean])


def test_an_aggregator_that_fails_fails_on_all_ranks(comm):
    def fails(values):
        raise ZeroDivisionError("no luck")

    aggregator = ObservationAggregator(comm, "x", aggregator=fails)
    error = ZeroDivisionError if comm.rank == 0 else PeerError
    with pytest.raises(error, match="no luck"):
        aggregator(FakeTrainer({"x": 1.0}))
    comm.allgather_obj(None)  # the ranks are in step


def test_a_result_that_can_not_be_sent_fails_on_all_ranks(comm):
    aggregator = ObservationAggregator(comm, "x", aggregator=lambda values: lambda: None)
    with pytest.raises(Exception, match="pickle"):
        aggregator(FakeTrainer({"x": 1.0}))
    comm.allgather_obj(None)


def test_what_is_no_number_on_one_rank_is_told_on_all(comm):
    last = comm.size - 1
    aggregator = ObservationAggregator(comm, "x")
    error = TypeError if comm.rank == last else PeerError
    with pytest.raises(error, match="'x' as str"):
        aggregator(FakeTrainer({"x": "one" if comm.rank == last else 1.0}))
    trainer = FakeTrainer({"x": 1.0}, 2)
    aggregator(trainer)  # what could not be sent is gone
    assert trainer.observation["x"] == 1.0


def test_a_copy_has_the_same_communicator(comm):
    twin = copy.deepcopy(ObservationAggregator(comm, "x"))
    trainer = FakeTrainer({"x": comm.rank})
    twin(trainer)
    assert trainer.observation["x"] == (comm.size - 1) / 2


def test_wrong_arguments_are_named(naive):
    with pytest.raises(TypeError, match="ObservationAggregator needs a communicator"):
        ObservationAggregator("main/loss", "x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="aggregator must be a function, not str"):
        ObservationAggregator(naive, "x", aggregator="max")  # type: ignore[arg-type]
    assert ObservationAggregator(naive, "x").priority == training.PRIORITY_EDITOR
