"""All ranks stop at the same iteration, when the mean of what they observe no longer improves."""

from __future__ import annotations

import copy

import chainer
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions
from chainer.training.triggers import EarlyStoppingTrigger

from chainermn_comm import PeerError
from chainermn_train.extensions import MultiNodeEarlyStoppingTrigger
from tests.support.linear import ScaledMean

pytestmark = pytest.mark.world


EXAMPLES = np.arange(6, dtype=np.float32)  # three iterations an epoch


def reporting(values, trigger=(1, "iteration")):
    """An extension that observes values[iteration - 1] as 'score', where it is not None."""

    @training.make_extension(trigger=trigger, priority=training.PRIORITY_WRITER)
    def report(trainer):
        value = values[trainer.updater.iteration - 1]
        if value is not None:
            chainer.report({"score": value})

    return report


def stopped_at(comm, trainer):
    """The iteration at which training stopped, the same on all ranks."""
    trainer.run()
    (iteration,) = set(comm.allgather_obj(trainer.updater.iteration))
    return iteration


@pytest.mark.parametrize("mode", ["min", "max"])
def test_it_stops_where_one_process_that_observes_the_mean_would(comm, trainer_for, mode):
    """Each rank alone would stop somewhere else, or not at all."""
    sign = 1 if mode == "min" else -1
    values = np.random.RandomState(1).rand(comm.size, 30) * 0.1
    values += np.abs(np.arange(30) - 8) / 8
    values[:, ::7] += 3  # a bad iteration now and then
    values = sign * (values + np.arange(comm.size)[:, np.newaxis])
    arguments = {"monitor": "score", "patience": 2, "mode": mode, "max_trigger": (10, "epoch")}
    reference = trainer_for(comm, ScaledMean(), EXAMPLES, EarlyStoppingTrigger(**arguments))
    reference.extend(reporting(values.mean(axis=0)))
    expected = stopped_at(comm, reference)
    assert 9 <= expected < 30
    trigger = MultiNodeEarlyStoppingTrigger(comm, **arguments)
    trainer = trainer_for(comm, ScaledMean(), EXAMPLES, trigger)
    trainer.extend(reporting(values[comm.rank]))
    assert stopped_at(comm, trainer) == expected
    assert isinstance(trigger, EarlyStoppingTrigger)
    assert trigger.get_training_length() == (10, "epoch")


def test_a_rank_that_observes_nothing_counts_nothing(comm, trainer_for):
    """Rank 0 alone evaluates, once an epoch: the others stop with it."""
    values = [None, None, 3.0, None, None, 2.0, None, None, 2.5, None, None, 2.1] + [None] * 12
    trigger = MultiNodeEarlyStoppingTrigger(
        comm, monitor="score", patience=2, max_trigger=(8, "epoch")
    )
    trainer = trainer_for(comm, ScaledMean(), EXAMPLES, trigger)
    trainer.extend(reporting(values if comm.rank == 0 else [None] * 24))
    assert stopped_at(comm, trainer) == 12
    assert trigger.best == 2.0


def test_each_value_counts_as_much(comm, trainer_for):
    values = [[rank + 1.0] * (rank + 1) + [None] * 8 for rank in range(comm.size)][comm.rank]
    trigger = MultiNodeEarlyStoppingTrigger(
        comm, (comm.size, "iteration"), "score", max_trigger=(comm.size + 1, "iteration")
    )
    trainer = trainer_for(comm, ScaledMean(), EXAMPLES, trigger)
    trainer.extend(reporting(values))
    assert stopped_at(comm, trainer) == comm.size + 1
    counts = range(1, comm.size + 1)
    assert trigger.best == pytest.approx(sum(n * n for n in counts) / sum(counts))


def test_one_rank_s_last_iteration_is_that_of_all(comm, trainer_for):
    """A limit that differs between ranks, as one of time does, leaves nobody waiting."""
    last = comm.size - 1
    limit = (4 if comm.rank == last else 50, "iteration")
    trigger = MultiNodeEarlyStoppingTrigger(comm, monitor="score", max_trigger=limit)
    trainer = trainer_for(comm, ScaledMean(), EXAMPLES, trigger)
    trainer.extend(reporting([1.0] * 50))
    assert stopped_at(comm, trainer) == 4


def test_ranks_whose_epochs_end_at_different_iterations_check_together(comm, trainer_for):
    trigger = MultiNodeEarlyStoppingTrigger(
        comm, monitor="score", patience=1, max_trigger=(30, "iteration")
    )
    trainer = trainer_for(comm, ScaledMean(), EXAMPLES[: 2 + 4 * (comm.rank % 2)], trigger)
    trainer.extend(reporting([5.0, 4.0, 3.0, 2.0, 1.0] + [9.0] * 30))
    # Rank 0 has an epoch in each iteration; the first that's no better is the sixth.
    assert stopped_at(comm, trainer) == 6


def test_gpu_like_and_variable_values_are_taken(comm, trainer_for):
    values = [chainer.Variable(np.array(2.0 + comm.rank, np.float16))] * 9
    trigger = MultiNodeEarlyStoppingTrigger(
        comm, monitor="score", patience=1, max_trigger=(3, "epoch")
    )
    trainer = trainer_for(comm, ScaledMean(), EXAMPLES, trigger)
    trainer.extend(reporting(values))
    assert stopped_at(comm, trainer) == 6
    assert trigger.best == 2 + (comm.size - 1) / 2


def test_nothing_observed_anywhere_warns_on_rank_0_and_goes_on(comm, trainer_for, recwarn):
    trigger = MultiNodeEarlyStoppingTrigger(comm, monitor="scoer", max_trigger=(2, "epoch"))
    trainer = trainer_for(comm, ScaledMean(), EXAMPLES, trigger)
    trainer.extend(reporting([1.0] * 6))
    assert stopped_at(comm, trainer) == 6
    told = [str(warning.message) for warning in recwarn if "scoer" in str(warning.message)]
    assert told == (["scoer is not in observation"] if comm.rank == 0 else [])


@pytest.mark.parametrize("snapshot_at", [4, 6, 9])
def test_a_resumed_training_stops_where_an_uninterrupted_one_does(
    comm, trainer_for, tmp_path, snapshot_at
):
    """In the middle of an epoch, and at its end, where the trigger is asked after the snapshot."""
    values = [3.0, 3.0, 3.0, 2.0, 2.0, 2.0, 1.0, 1.0, 9.0, 2.5, 2.5, 2.5] + [3.5] * 18
    values = [value + comm.rank for value in values]

    def build(snapshot=None):
        trigger = MultiNodeEarlyStoppingTrigger(
            comm, monitor="score", patience=2, max_trigger=(10, "epoch")
        )
        trainer = trainer_for(comm, ScaledMean(), EXAMPLES, trigger)
        trainer.extend(reporting(values))
        return trainer

    whole = build()
    whole.extend(extensions.snapshot(filename="at_{.updater.iteration}"), trigger=(1, "iteration"))
    expected = stopped_at(comm, whole)
    assert expected == 12
    resumed = build()
    chainer.serializers.load_npz(tmp_path / f"at_{snapshot_at}", resumed, strict=False)
    assert resumed.updater.iteration == snapshot_at
    assert stopped_at(comm, resumed) == expected
    assert resumed.stop_trigger.best == whole.stop_trigger.best


def test_snapshots_change_nothing(comm, trainer_for):
    values = [5.0, 1.0, 3.0, 2.0, 4.0, 1.0, 2.0, 9.0, 1.0, 8.0, 1.0, 1.0] + [9.0] * 18
    best = []
    for snapshots in (False, True):
        trigger = MultiNodeEarlyStoppingTrigger(
            comm, monitor="score", patience=1, max_trigger=(10, "epoch")
        )
        trainer = trainer_for(comm, ScaledMean(), EXAMPLES, trigger)
        trainer.extend(reporting(values))
        if snapshots:
            trainer.extend(extensions.snapshot(), trigger=(2, "iteration"))
        assert stopped_at(comm, trainer) == 9
        best.append(trigger.best)
    assert best[0] == best[1] == 7 / 3


def test_an_error_in_one_rank_s_trigger_is_raised_on_all(comm, trainer_for):
    last = comm.size - 1

    def fails(trainer):
        if comm.rank == last and trainer.updater.iteration == 2:
            raise ZeroDivisionError("no luck")
        return False

    trigger = MultiNodeEarlyStoppingTrigger(comm, monitor="score", max_trigger=fails)
    trainer = trainer_for(comm, ScaledMean(), EXAMPLES, trigger)
    with pytest.raises(ZeroDivisionError if comm.rank == last else PeerError, match="no luck"):
        trainer.run(show_loop_exception_msg=False)


def test_it_says_on_rank_0_that_it_stops(comm, trainer_for, capsys):
    trigger = MultiNodeEarlyStoppingTrigger(
        comm, monitor="score", patience=1, verbose=True, max_trigger=(9, "epoch")
    )
    trainer = trainer_for(comm, ScaledMean(), EXAMPLES, trigger)
    trainer.extend(reporting([1.0] * 27))
    assert stopped_at(comm, trainer) == 6
    said = capsys.readouterr().out
    assert ("Epoch 2: early stopping" in said) == (comm.rank == 0)


def test_a_copy_has_the_same_communicator(comm):
    trigger = MultiNodeEarlyStoppingTrigger(comm, monitor="score", patients=5)
    twin = copy.deepcopy(trigger)
    assert twin.comm is comm
    assert twin.patience == 5


def test_wrong_arguments_are_named(naive):
    with pytest.raises(TypeError, match="MultiNodeEarlyStoppingTrigger needs a communicator"):
        MultiNodeEarlyStoppingTrigger((1, "epoch"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="patience"):
        MultiNodeEarlyStoppingTrigger(naive, patience=1, patients=2)
