"""ObservationAggregator shows all ranks the same combination of what each observed."""

from __future__ import annotations

from types import SimpleNamespace

import chainer
import numpy as np
import pytest

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
        (2, 3.0),
        (np.float16(2), np.float16(3)),
        (np.int64(2), np.float64(3)),
        (np.array([2, 4], np.float32), np.array([3, 6], np.float32)),
        (np.array([2, 4], np.int32), np.array([3.0, 6.0])),
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
    variable = chainer.Variable(np.asarray(value, np.float32))
    found = observed(aggregator, 4, x=variable)["x"]
    assert (type(found), found.dtype) == (chainer.Variable, np.float32)


def test_an_aggregator_gets_values_as_they_were_observed(comm):
    """Those of variables are arrays; values need not be numbers."""
    calls = []
    aggregator = ObservationAggregator(comm, "x", "y", aggregator=calls.append)
    observed(aggregator, x={"a": [1]})
    observed(aggregator, 2, x=chainer.Variable(np.ones(2, np.float32)))
    if comm.rank:
        assert not calls
        return
    dicts, arrays = calls
    assert dicts == [[{"a": [1]}]] * comm.size
    assert all(type(value) is np.ndarray for (value,) in arrays)


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
