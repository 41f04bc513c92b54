"""All ranks stop at the same iteration, when the mean of what they observe no longer improves."""

from __future__ import annotations

from functools import partial

import chainer
import numpy as np
import pytest
from chainer import Variable, training
from chainer.serializers import load_npz
from chainer.training import extensions
from chainer.training.triggers import EarlyStoppingTrigger, ManualScheduleTrigger
from numpy.random import RandomState

from chainermn_train.extensions import MultiNodeEarlyStoppingTrigger

pytestmark = pytest.mark.world

EarlyStopping = partial(MultiNodeEarlyStoppingTrigger, monitor="score")


def reporting(values):
    """An extension that observes those of these values by iteration as 'score'."""

    @training.make_extension(
        trigger=(1, "iteration"), priority=training.PRIORITY_WRITER
    )
    def report(trainer):
        if trainer.updater.iteration in values:
            chainer.report({"score": values[trainer.updater.iteration]})

    return report


def from_one(values):
    return dict(enumerate(values, start=1))


def ended(comm, trainer):
    """The iteration at which training stopped, the same on all ranks."""
    trainer.run()
    (iteration,) = set(comm.allgather_obj(trainer.updater.iteration))
    return iteration


@pytest.fixture
def stopped_at(comm, trainer_for):
    """The iteration at which a training with this trigger stops; three are an epoch."""

    def stopped(trigger, values):
        return ended(comm, trainer_for(comm, trigger, reporting(values)))

    return stopped


@pytest.mark.parametrize("mode", ["min", "max"])
def test_it_stops_where_one_process_that_observes_the_mean_would(
    comm, stopped_at, mode
):
    """Each rank alone would stop somewhere else, or not at all."""
    values = RandomState(1).rand(comm.size, 30) * 0.1
    values += np.abs(np.arange(30) - 8) / 8 + np.arange(comm.size)[:, np.newaxis]
    values[:, ::7] += 3  # a bad iteration now and then
    values *= {"min": 1, "max": -1}[mode]
    how = dict(monitor="score", patience=2, mode=mode, max_trigger=(10, "epoch"))
    expected = stopped_at(EarlyStoppingTrigger(**how), from_one(values.mean(axis=0)))
    assert 9 <= expected < 30
    trigger = MultiNodeEarlyStoppingTrigger(comm, **how)
    assert stopped_at(trigger, from_one(values[comm.rank])) == expected


def test_a_rank_that_observes_nothing_counts_nothing(comm, trainer_for, capsys):
    """Rank 0 alone evaluates, once an epoch: the others stop with it, and it says so."""
    trigger = EarlyStopping(
        comm, patients=2, verbose=True, suffix="/mean", max_trigger=(8, "epoch")
    )
    values = {}
    if comm.rank == 0:
        numbers = {3: 3.0, 6: 2.0, 9: 2.5, 12: 2.25}
        for iteration, number in numbers.items():
            values[iteration] = Variable(np.array(number, np.float16))
    trainer = trainer_for(comm, trigger, reporting(values))
    assert ended(comm, trainer) == 12
    assert trigger.best == 2
    assert trainer.observation["score/mean"] == 2.25
    assert ("Epoch 4: early stopping" in capsys.readouterr().out) == (comm.rank == 0)


def test_ranks_whose_epochs_end_at_different_iterations_check_together(
    comm, trainer_for
):
    trigger = EarlyStopping(comm, patience=1, max_trigger=(30, "iteration"))
    report = reporting(from_one([5.0, 4.0, 3.0, 2.0, 1.0] + [9.0] * 30))
    mine = np.arange(2 + 4 * (comm.rank % 2), dtype=np.float32)
    trainer = trainer_for(comm, trigger, report, examples=mine)
    # Rank 0 has an epoch in each iteration; the first that's no better is the sixth.
    assert ended(comm, trainer) == 6


def test_nothing_observed_anywhere_warns_on_rank_0_and_goes_on(
    comm, stopped_at, recwarn
):
    """To the last iteration of one rank: a limit may differ, as one of time does."""
    most = 50
    if comm.rank == comm.size - 1:
        most = 4
    limit = (most, "iteration")
    assert stopped_at(EarlyStopping(comm, max_trigger=limit), {}) == 4
    told = [str(warning.message) for warning in recwarn]
    assert ("score is not in observation" in told) == (comm.rank == 0)


@pytest.mark.parametrize("at", [4, 6])
def test_a_resumed_training_stops_where_an_uninterrupted_one_does(
    comm, trainer_for, tmp_path, at
):
    """In the middle of an epoch, and at its end, where the trigger is asked after the snapshot."""
    values = [3.5, 3.0, 2.5, 2.5, 2.0, 1.5, 1.0, 1.0, 9.0, *[2.5] * 3, *[3.5] * 18]

    def build():
        trigger = EarlyStopping(comm, patience=2, max_trigger=(10, "epoch"))
        report = reporting(from_one(np.array(values) + comm.rank))
        return trainer_for(comm, trigger, report)

    whole = build()
    resumed = build()
    snapshot = extensions.snapshot(filename="snapshot")
    whole.extend(snapshot, trigger=ManualScheduleTrigger(at, "iteration"))
    assert ended(comm, whole) == 12
    load_npz(tmp_path / "snapshot", resumed, strict=False)
    assert ended(comm, resumed) == 12
    best = 2 + (comm.size - 1) / 2
    assert resumed.stop_trigger.best == best
    assert whole.stop_trigger.best == best
