"""ObservationAggregator shows all ranks the same combination of what each observed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from chainer import Variable
from chainer.serializers import load_npz, save_npz

from chainermn_train.extensions import ObservationAggregator
from tests.support.oracles.raised import raises_on_all
from tests.support.oracles.samples import alike

pytestmark = pytest.mark.world


def observed(aggregator, iteration=1, **observation):
    """What is observed once the aggregator has seen this, without a training."""
    updater = SimpleNamespace(iteration=iteration, epoch_detail=iteration / 3)
    aggregator(SimpleNamespace(observation=observation, updater=updater))
    return observation


def every_second(comm, **options):
    """An aggregator of "x" that combines at every second iteration."""
    return ObservationAggregator(comm, "x", comm_trigger=(2, "iteration"), **options)


def test_values_are_kept_until_the_trigger_fires_and_then_reduced_in_any_way(comm):
    """An aggregator gets them as they were observed: arrays of variables, and no numbers."""
    calls = []
    aggregator = every_second(comm, aggregator=calls.append)
    observed(aggregator, 1, x={"a": [1]})
    assert calls == []
    observed(aggregator, 2, x=Variable(np.ones(2, np.float32)))
    expected = [([{"a": [1]}, np.ones(2, np.float32)],) * comm.size]
    expected_calls = []
    if comm.rank == 0:
        expected_calls = expected
    assert alike([tuple(each) for each in calls], expected_calls)


def test_the_mean_is_over_values_and_reaches_ranks_that_observed_none(comm):
    aggregator = every_second(comm)
    values = [[], [1.0], [1.0, 2.0], []][comm.rank]
    everything = [x for rank in comm.allgather_obj(values) for x in rank]
    expected = {}
    if everything:
        expected = {"x": np.mean(everything)}
    for number in range(1, 5):
        mine = {}
        if values:
            mine = {"x": values.pop(0)}
        seen = {}
        if number == 2:
            seen = expected
        assert observed(aggregator, number, **mine) == seen


def test_arrays_are_combined_and_kept_as_they_were_observed(comm, tmp_path):
    """In a snapshot, too."""
    array = np.array([1, 2], np.int8) * (comm.rank + 1)
    one = every_second(comm)
    other = every_second(comm)
    observed(one, x=array)
    array += 100  # which is kept as it was
    observed(other, x=5.0)  # forgotten
    save_npz(tmp_path / "state.npz", one)
    load_npz(tmp_path / "state.npz", other)
    mean = (comm.size + 1) / 2
    found = observed(other, 2)["x"].tolist()
    assert found == [mean, 2 * mean]


@pytest.mark.parametrize(
    ("value", "mean"),
    [
        (2, 3.0),
        (np.float16(2), np.float16(3)),
        (np.int64(2), np.float64(3)),
        (np.array([2, 4], np.int32), np.array([3.0, 6.0])),
        (Variable(np.float16([2])), Variable(np.float16([3]))),
    ],
    ids=repr,
)
def test_the_mean_has_the_type_of_what_is_observed(comm, value, mean):
    """As in Chainer 7."""
    aggregator = every_second(comm)
    observed(aggregator, x=value)
    found = observed(aggregator, 2, x=2 * value)["x"]
    assert type(found) is type(mean)
    if isinstance(mean, Variable):
        assert alike(found.array, mean.array)
    else:
        assert alike(found, mean)


def test_what_is_no_number_on_one_rank_is_told_on_all(comm):
    aggregator = ObservationAggregator(comm, "x")
    is_last = comm.rank == comm.size - 1
    x = 1.0
    if is_last:
        x = "one"
    with raises_on_all(is_last, TypeError, "'x' as str"):
        observed(aggregator, x=x)
    # What could not be sent is gone.
    assert observed(aggregator, 2, x=1.0) == {"x": 1.0}
