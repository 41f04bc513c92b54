"""GenericMultiNodeEvaluator has one rank make a metric of everybody's outputs."""

from __future__ import annotations

import copy
import weakref

import chainer
import numpy as np
import pytest
from chainer.datasets import TupleDataset
from chainer.iterators import MultithreadIterator, SerialIterator

from chainermn_comm import PeerError, RankMismatchError
from chainermn_train.extensions import GenericMultiNodeEvaluator
from tests.support.training.linear import ScaledMean
from tests.support.training.trainers import logged

pytestmark = pytest.mark.world


def examples(comm, count):
    return np.arange(count, dtype=np.float32) + 100 * comm.rank


def iterator(examples, batch=2):
    return SerialIterator(examples, batch, repeat=False, shuffle=False)


def evaluator(comm, count, calc_local, aggregate=list, **how):
    """One over so many examples, with these two parts."""
    made = GenericMultiNodeEvaluator(
        comm, iterator(examples(comm, count)), ScaledMean(), **how
    )
    made.calc_local, made.aggregate = calc_local, aggregate
    return made


def median_of(results):
    """Of all examples, which is not the mean of the ranks' medians."""
    everything = [each for result in results for each in result.tolist()]
    return {"median": float(np.median(everything)) if everything else None}


def without_graphs(x):
    assert not chainer.config.train
    assert not chainer.config.enable_backprop
    return x


COUNTS = [lambda rank: 3 * rank, lambda rank: 4 - rank, lambda rank: 0]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("root", [0, -1])
def test_a_metric_that_is_no_mean_equals_that_of_one_process(comm, count, root):
    own = count(comm.rank)
    everything = np.concatenate(comm.allgather_obj(examples(comm, own)))
    made = evaluator(comm, own, without_graphs, median_of, root=root % comm.size)
    expected = float(np.median(everything)) if len(everything) else None
    results = [each(None) for each in (made, made, copy.deepcopy(made))]  # and again
    assert results == [{"median": expected} if comm.rank == made.root else None] * 3
    assert made.evaluate() == {"median": expected}


def test_in_a_trainer_all_ranks_log_the_result(comm, trainer_for):
    """Whose own values stay as they are, though the model reports."""
    model, seen = ScaledMean(), []
    mine = examples(comm, 2 * comm.rank + 1)
    expected = float(np.median(np.concatenate(comm.allgather_obj(mine))))
    trainer = trainer_for(comm, (1, "epoch"), model=model)
    results = {"text": "no number", "variable": chainer.Variable(np.ones(()))}
    for aggregate, name in (median_of, None), (lambda _: results, "kinds"):
        made = evaluator(comm, len(mine), lambda x: model(x).array[None], aggregate)
        made.target = model
        if aggregate is median_of:
            made.calc_local = lambda x: x
        trainer.extend(made, name=name)
    for priority in 1000, 1:
        record = lambda t: seen.append(float(t.observation["main/loss"].array))  # noqa: E731
        trainer.extend(record, name=f"at {priority}", priority=priority)
    (entry,) = logged(trainer, (1, "epoch"))
    assert entry["validation/median"] == expected
    assert entry["kinds/variable"] == 1
    assert "kinds/text" not in entry
    assert seen[0::2] == seen[1::2]


def test_outputs_come_batch_by_batch_in_rank_order(comm):
    result = evaluator(
        comm, 2 * comm.rank + 1, lambda x: (comm.rank, x.tolist())
    ).evaluate()
    assert result == [
        (rank, (np.arange(2 * rank + 1) + 100.0 * rank)[2 * i : 2 * i + 2].tolist())
        for i in range(comm.size)
        for rank in range(comm.size)
        if i <= rank
    ]


def test_the_root_gets_outputs_as_they_are_and_all_ranks_the_result_on_the_host(comm):
    kinds = []

    def aggregate(results):
        kinds.append(type(results[-1]["v"][1]))
        return results

    made = evaluator(comm, 2, lambda x: {"v": ["text", chainer.Variable(x)]}, aggregate)
    result = made.evaluate()
    assert kinds == ([chainer.Variable] if comm.rank == 0 else [])
    for rank, each in enumerate(result):
        assert each["v"][0] == "text"
        np.testing.assert_array_equal(each["v"][1], np.arange(2) + 100 * rank)


def test_the_result_on_the_root_is_what_aggregate_returns(comm):
    """It needs not be picklable, since it stays there; others have none."""
    result = (number for number in range(3))
    made = evaluator(comm, 2, lambda x: None, lambda _: result)
    assert made(None) is (result if comm.rank == 0 else None)


def test_a_class_written_for_chainer_7_finds_what_it_expects(comm):
    """The target may be anything; what `aggregate` reports goes to its rank's observation."""

    class Custom(GenericMultiNodeEvaluator):
        def calc_local(self, x):
            return self._targets["main"]["factor"] * x.sum()

        def aggregate(self, results):
            chainer.report({"total": sum(results)})

    seen: list = []
    observation: dict = {}
    with chainer.Reporter().scope(observation):
        mine = examples(comm, 3)
        target = {"factor": 2}
        made = Custom(comm, iterator(mine), target, progress_hook=seen.append)
        assert made(None) is None
    total = sum(2 * (3 + 300 * rank) for rank in range(comm.size))
    assert observation == ({"total": total} if comm.rank == 0 else {})
    assert seen == ([mine[:2].tolist(), mine[2:].tolist()] if comm.rank == 0 else [])


def test_by_default_the_target_s_outputs_are_listed(comm):
    """The target may be a function, and batches tuples or dicts; other iterators serve, too."""
    pairs = TupleDataset(examples(comm, 2), examples(comm, 2))
    plus = lambda x, y: (x + y).tolist()  # noqa: E731
    got = GenericMultiNodeEvaluator(comm, iterator(pairs, 1), plus).evaluate()
    assert sorted(got) == sorted(
        [200.0 * r + 2 * i] for r in range(comm.size) for i in range(2)
    )
    dicts = iterator([{"a": np.float32(comm.rank)}])
    got = GenericMultiNodeEvaluator(comm, dicts, lambda a: float(a[0])).evaluate()
    assert got == list(range(comm.size))
    threads = MultithreadIterator(
        list(examples(comm, 3)), 2, repeat=False, shuffle=False
    )
    add = lambda batch, device: (float(sum(batch)),)  # noqa: E731
    made = GenericMultiNodeEvaluator(comm, threads, lambda x: x, converter=add)
    expected = [1.0 + 200 * r for r in range(comm.size)] + [
        2.0 + 100 * r for r in range(comm.size)
    ]
    assert made.evaluate() == made.evaluate() == expected
    made.finalize()


def test_only_the_root_holds_more_than_one_batch_of_outputs(comm):
    """And no outputs of its own but as pickles."""

    class Large:
        def __reduce__(self):
            return int, (10,)

    alive: weakref.WeakSet = weakref.WeakSet()
    most = []

    def large(x):
        most.append(len(alive))
        alive.add(made := Large())
        return made

    assert evaluator(comm, 40, large, sum).evaluate() == 200 * comm.size
    assert len(most) == 20
    assert max(most) <= 1


class Loads:
    """It can't be unpickled."""

    def __reduce__(self):
        return int, ("no luck",)


def fail(*_):
    raise ZeroDivisionError("no luck")


# What fails, by the step and the rank where it does.
FAILURES = {
    "a later batch": (-1, {"calc_local": lambda x: fail() if x[0] % 100 == 4 else 1}),
    "aggregate": (0, {"calc_local": lambda x: 1, "aggregate": fail}),
    "the hook": (0, {"calc_local": lambda x: 1, "progress_hook": fail}),
    "pickling": (-1, {"calc_local": lambda x: lambda: "no luck"}),
    "unpickling": (0, {"calc_local": lambda x: Loads()}),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_of_one_rank_is_raised_on_all(comm, kind):
    who, parts = FAILURES[kind]
    who %= comm.size
    if comm.rank != who and kind != "unpickling":
        parts = {"calc_local": lambda x: 1}
    made = evaluator(comm, 8, **parts)
    error = Exception if comm.rank == who else PeerError
    with pytest.raises(error, match=r"no luck|ickle|local object") as raised:
        made()
    assert isinstance(raised.value, PeerError) == (comm.rank != who)
    assert evaluator(comm, 4, lambda x: 1).evaluate() == [1] * (2 * comm.size)


@pytest.mark.sizes(2, 3, 4)
def test_roots_that_differ_are_told_on_all_ranks(comm):
    with pytest.raises(
        RankMismatchError, match="disagree on root: 0 on rank 0; 1 on rank"
    ):
        evaluator(comm, 4, without_graphs, root=min(comm.rank, 1))()


def test_wrong_arguments_are_named(naive):
    for wrong, error, text in (
        ({"iterator": [1, 2]}, TypeError, "iterator must be an iterator, not list"),
        ({"iterator": SerialIterator([1], 1)}, ValueError, "repeat=False"),
        ({"root": naive.size}, ValueError, "root must be from 0 to"),
    ):
        arguments = {"iterator": iterator([]), "target": ScaledMean()} | wrong
        with pytest.raises(error, match=text):
            GenericMultiNodeEvaluator(naive, **arguments)
