"""ObservationAggregator shows all ranks the same combination of what each observed."""

from __future__ import annotations

from types import SimpleNamespace

import chainer
import numpy as np
import pytest
from chainer import training

from chainermn_comm import PeerError
from chainermn_train.extensions import ObservationAggregator
from tests.support.training.linear import ScaledMean
from tests.support.training.trainers import logged

pytestmark = pytest.mark.world


class Model(ScaledMean):
    """Reports the mean of its inputs, also as a variable."""

    def __call__(self, x):
        chainer.report({"mean": x.mean()}, self)
        return super().__call__(x)


@pytest.fixture
def train(comm, trainer_for):
    """Makes a trainer; rank r's examples are 10 r to 10 r + 5."""
    examples = np.arange(6, dtype=np.float32) + 10 * comm.rank
    return lambda stop, *more: trainer_for(
        comm, stop, *more, model=Model(), examples=examples
    )


def observed(aggregator, iteration=1, **observation):
    """What is observed once the aggregator has seen this, without a training."""
    updater = SimpleNamespace(iteration=iteration, epoch_detail=iteration / 3)
    aggregator(SimpleNamespace(observation=observation, updater=updater))
    return observation


def test_every_rank_logs_the_mean_of_all_ranks(comm, train):
    """An extension that was added earlier, with lower priority, reads it."""
    seen = []
    trainer = train((2, "epoch"), ObservationAggregator(comm, "main/loss", "loss"))
    trainer.extend(lambda t: seen.append(t.observation["main/mean"]), name="reader")
    trainer.extend(ObservationAggregator(comm, "main/mean"))
    log = logged(trainer)
    means = [start + 0.5 + 10 * (comm.size - 1) / 2 for start in (0, 2, 4, 0, 2, 4)]
    np.testing.assert_allclose([entry["main/mean"] for entry in log], means, rtol=1e-12)
    # Under its own name.
    own = comm.allgather_obj([entry["main/loss"] for entry in log])
    np.testing.assert_allclose([entry["loss"] for entry in log], np.mean(own, axis=0))
    mine = [entry["main/mean"] for entry in log]
    assert seen == mine
    assert comm.allgather_obj(mine) == [mine] * comm.size  # the same bits


def test_values_are_kept_until_the_trigger_fires_and_then_reduced_in_any_way(
    comm, train
):
    calls = []

    def largest(values):
        calls.append(values)
        return max(max(each) for each in values)

    how = {"comm_trigger": (1, "epoch"), "aggregator": largest}
    log = logged(train((2, "epoch"), ObservationAggregator(comm, "main/mean", **how)))
    found = [entry.get("main/mean") for entry in log]
    assert found == [None, None, 4.5 + 10 * (comm.size - 1)] * 2
    values = [
        [start + 0.5 + 10 * rank for start in (0, 2, 4)] for rank in range(comm.size)
    ]
    assert calls == ([values, values] if comm.rank == 0 else [])


def test_the_mean_is_over_values_and_reaches_ranks_that_observed_none(comm):
    aggregator = ObservationAggregator(comm, "x", comm_trigger=(3, "iteration"))
    everything = [x for rank in range(comm.size) for x in (1, 2, 3)[:rank]]
    expected = {"x": sum(everything) / len(everything)} if everything else {}
    for number in range(1, 7):
        mine = {"x": np.float16(number)} if number <= min(comm.rank, 3) else {}
        assert observed(aggregator, number, **mine) == (expected if number == 3 else {})


def test_arrays_are_combined_and_kept_as_they_were_observed(comm, tmp_path):
    """In a snapshot, too."""
    array = np.array([1, 2], np.int8) * (comm.rank + 1)
    one, other = (
        ObservationAggregator(comm, "x", comm_trigger=(2, "iteration"))
        for _ in range(2)
    )
    observed(one, x=array)
    array += 100
    observed(other, x=5.0)  # forgotten
    chainer.serializers.save_npz(tmp_path / "state.npz", one)
    chainer.serializers.load_npz(tmp_path / "state.npz", other)
    mean = (comm.size + 1) / 2
    np.testing.assert_array_equal(
        observed(one, 2, x=array)["x"], [mean + 50, 2 * mean + 50]
    )
    np.testing.assert_array_equal(observed(other, 2)["x"], [mean, 2 * mean])


@pytest.mark.parametrize(
    ("value", "mean"),
    [
        (2.0, 3.0),
        (2, 3.0),
        (np.float32(2), np.float32(3)),
        (np.float16(2), np.float16(3)),
        (np.int64(2), np.float64(3)),
        (np.array(2, np.float32), np.float32(3)),
        (np.array([2, 4], np.float32), np.array([3, 6], np.float32)),
        (np.array([2, 4], np.int32), np.array([3.0, 6.0])),
        (np.complex64(2j), np.complex64(3j)),
    ],
    ids=repr,
)
def test_the_mean_has_the_type_of_what_is_observed(comm, value, mean):
    """As in Chainer 7."""
    aggregator = ObservationAggregator(comm, "x", comm_trigger=(2, "iteration"))
    observed(aggregator, x=value)
    found = observed(aggregator, 2, x=2 * value)["x"]
    assert type(found) is type(mean)
    assert np.asarray(found).dtype == np.asarray(mean).dtype
    np.testing.assert_array_equal(found, mean)


def test_the_mean_of_variables_is_a_variable(comm):
    x = chainer.Parameter(np.full((), comm.rank, np.float32))
    aggregator = ObservationAggregator(comm, "x")
    found = observed(aggregator, x=chainer.functions.identity(x))["x"]
    assert type(found) is chainer.Variable
    assert (found.dtype, found.creator, found.requires_grad) == (
        np.float32,
        None,
        False,
    )
    assert found.array == np.float32((comm.size - 1) / 2)


def test_an_aggregator_gets_values_as_they_were_observed(comm):
    """Those of variables are arrays; values need not be numbers."""
    calls = []
    aggregator = ObservationAggregator(comm, "x", "y", aggregator=calls.append)
    values = np.float32(1), {"a": [1]}, chainer.Variable(np.ones(2, np.float32))
    for iteration, value in enumerate(values, start=1):
        observed(aggregator, iteration, x=value)
    if comm.rank:
        assert not calls
        return
    assert [len(ranks) for ranks in calls] == [comm.size] * 3
    (numbers, dicts, arrays) = ([value for (value,) in ranks] for ranks in calls)
    assert {type(each) for each in numbers} == {np.float32}
    assert dicts == [{"a": [1]}] * comm.size
    assert {(type(each), each.dtype) for each in arrays} == {
        (np.ndarray, np.dtype("f4"))
    }


def test_a_resumed_training_reports_what_an_uninterrupted_one_does(
    comm, train, tmp_path
):
    def build(stop):
        aggregator = ObservationAggregator(
            comm, "main/loss", comm_trigger=(4, "iteration")
        )
        return train((stop, "iteration"), aggregator)

    expected = [entry.get("main/loss") for entry in logged(build(8))]
    assert [value is not None for value in expected] == 2 * [False, False, False, True]
    first, second = build(6), build(8)
    first.run()
    chainer.serializers.save_npz(tmp_path / "snapshot.npz", first)
    chainer.serializers.load_npz(tmp_path / "snapshot.npz", second)
    assert [entry.get("main/loss") for entry in logged(second)] == expected[6:]


def test_what_is_no_number_on_one_rank_is_told_on_all(comm):
    aggregator, last = ObservationAggregator(comm, "x"), comm.size - 1
    with pytest.raises(
        TypeError if comm.rank == last else PeerError, match="'x' as str"
    ):
        observed(aggregator, x="one" if comm.rank == last else 1.0)
    # What could not be sent is gone.
    assert observed(aggregator, 2, x=1.0) == {"x": 1.0}


def test_an_aggregator_is_a_function(naive):
    with pytest.raises(TypeError, match="aggregator must be a function, not str"):
        ObservationAggregator(naive, "x", aggregator="max")  # type: ignore[arg-type]
    assert ObservationAggregator(naive, "x").priority == training.PRIORITY_EDITOR
