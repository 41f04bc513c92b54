"""GenericMultiNodeEvaluator has one rank make a metric of everybody's outputs."""

from __future__ import annotations

import copy
import weakref
from collections import namedtuple

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

Pair = namedtuple("Pair", "first second")


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


COUNTS = [lambda rank: 5, lambda rank: 3 * rank, lambda rank: 4 - rank, lambda rank: 0]


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
    model, seen, before = ScaledMean(), [], []
    mine = examples(comm, 2 * comm.rank + 1)
    expected = float(np.median(np.concatenate(comm.allgather_obj(mine))))
    trainer = trainer_for(comm, (2, "epoch"), model=model)
    for how in {}, {"name": "again"}:
        trainer.extend(evaluator(comm, len(mine), lambda x: x, median_of), **how)
    words = {
        "text": "no number",
        "nothing": None,
        "variable": chainer.Variable(np.ones(())),
    }
    trainer.extend(evaluator(comm, 1, lambda x: x, lambda _: words), name="words")
    trainer.extend(
        GenericMultiNodeEvaluator(comm, iterator(mine), model), name="outputs"
    )
    for values, name, priority in (before, "before", 1000), (seen, "seen", 1):
        record = lambda t, to=values: to.append(float(t.observation["main/loss"].array))  # noqa: E731
        trainer.extend(record, name=name, priority=priority)
    log = logged(trainer, (1, "epoch"))
    for key in "validation/median", "again/median":
        assert [entry[key] for entry in log] == [expected, expected]
    assert [entry["words/variable"] for entry in log] == [1, 1]
    assert not {"words/text", "words/nothing"}.intersection(*log)
    assert len(seen) == 6
    assert seen == before  # training's own values, not evaluation's


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


def test_outputs_may_be_of_any_kind(comm):
    """The root gets a list of them as they are, and all ranks get variables as arrays."""

    def kinds(x):
        v = chainer.Variable(x)
        return {
            "v": [v, (v, None)],
            "p": Pair(v, "text"),
            "none": None,
            3: np.float16(1),
        }

    def check(results, kind):
        assert type(results) is list
        assert len(results) == comm.size
        for rank, each in enumerate(results):
            assert type(each["p"]) is Pair
            for value in (each["v"][0], each["v"][1][0], each["p"].first):
                assert type(value) is kind
                assert value.dtype == np.float32
                np.testing.assert_array_equal(to_cpu(value), np.arange(2) + 100 * rank)
            assert (each["p"].second, each["none"], each[3]) == (
                "text",
                None,
                np.float16(1),
            )
        return results

    made = evaluator(comm, 2, kinds, lambda results: check(results, chainer.Variable))
    check(made.evaluate(), np.ndarray)
    assert evaluator(comm, 2, lambda x: None).evaluate() == [None] * comm.size


def to_cpu(value):
    return value.array if isinstance(value, chainer.Variable) else value


def test_the_result_on_the_root_is_what_aggregate_returns(comm):
    """It needs not be picklable, since it stays there; others have none."""
    result = (number for number in range(3))
    made = evaluator(comm, 2, lambda x: None, lambda _: result)
    assert made(None) is (result if comm.rank == 0 else None)


@pytest.mark.parametrize("root", [0, -1])
def test_the_progress_hook_sees_the_root_s_batches(comm, root):
    root %= comm.size
    seen: list = []
    made = evaluator(comm, 3, lambda x: None, root=root, progress_hook=seen.append)
    made(None)
    mine = examples(comm, 3).tolist()
    assert seen == ([mine[:2], mine[2:]] if comm.rank == root else [])

    def fails(batch):
        raise ZeroDivisionError("no luck")

    with pytest.raises(
        ZeroDivisionError if comm.rank == root else PeerError, match="no luck"
    ):
        evaluator(comm, 3, lambda x: None, root=root, progress_hook=fails)(None)
    comm.allgather_obj(None)


def test_a_class_written_for_chainer_7_finds_what_it_expects(comm):
    """The target may be anything; what `aggregate` reports goes to its rank's observation."""

    class Custom(GenericMultiNodeEvaluator):
        def calc_local(self, x):
            return self._targets["main"]["factor"] * x.sum()

        def aggregate(self, results):
            chainer.report({"total": sum(results)})

    observation: dict = {}
    with chainer.Reporter().scope(observation):
        made = Custom(comm, iterator(examples(comm, 3)), {"factor": 2})
        assert made(None) is None
    total = sum(2 * (3 + 300 * rank) for rank in range(comm.size))
    assert observation == ({"total": total} if comm.rank == 0 else {})


def test_by_default_the_target_s_outputs_are_listed(comm):
    """The target may be a function, and batches tuples or dicts; other iterators serve, too."""
    pairs = TupleDataset(examples(comm, 2), examples(comm, 2))
    plus = lambda x, y: (x + y).tolist()  # noqa: E731
    got = GenericMultiNodeEvaluator(comm, iterator(pairs, 1), plus).evaluate()
    assert sorted(got) == sorted(
        [200.0 * r + 2 * i] for r in range(comm.size) for i in range(2)
    )
    dicts = [{"a": np.float32(comm.rank)}]
    got = GenericMultiNodeEvaluator(
        comm, iterator(dicts), lambda a: a.tolist()
    ).evaluate()
    assert got == [[float(rank)] for rank in range(comm.size)]
    got = GenericMultiNodeEvaluator(
        comm, iterator(examples(comm, 3), 3), ScaledMean()
    ).evaluate()
    assert got == [1 + 100.0 * rank for rank in range(comm.size)]
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


def test_an_error_in_a_later_batch_is_raised_on_all(comm):
    last = comm.size - 1

    def fails(x):
        if comm.rank == last and x[0] % 100 == 4:
            raise ZeroDivisionError("no luck")

    with pytest.raises(
        ZeroDivisionError if comm.rank == last else PeerError, match="no luck"
    ):
        evaluator(comm, 8, fails)()
    comm.allgather_obj(None)  # the ranks are in step


def test_an_aggregate_that_fails_keeps_nobody_waiting(comm):
    failing = [True, False]

    def aggregate(results):
        assert results == [1] * (3 * comm.size)
        if failing.pop(0):
            raise ZeroDivisionError("no luck")
        return "no error"

    made = evaluator(comm, 6, lambda x: 1, aggregate)
    with pytest.raises(
        ZeroDivisionError if comm.rank == 0 else PeerError, match="no luck"
    ):
        made()
    assert made.evaluate() == "no error"
    comm.allgather_obj(None)


def test_what_can_not_be_sent_is_told_on_all_ranks(comm):
    class Loads:
        def __reduce__(self):
            return int, ("x",)  # fails where it is unpickled

    for call in (
        evaluator(
            comm, 4, lambda x: (lambda: None) if comm.rank == comm.size - 1 else 1
        ),
        evaluator(
            comm, 4, lambda x: 1, lambda results: (each for each in results)
        ).evaluate,
        evaluator(comm, 4, lambda x: Loads()),
    ):
        with pytest.raises(Exception, match=r"pickle|local object|invalid literal"):
            call()
        comm.allgather_obj(None)


@pytest.mark.sizes(2, 3, 4)
def test_roots_that_differ_are_told_on_all_ranks(comm):
    with pytest.raises(
        RankMismatchError, match="disagree on root: 0 on rank 0; 1 on rank"
    ):
        evaluator(comm, 4, without_graphs, root=min(comm.rank, 1))()


def test_wrong_arguments_are_named(naive):
    for wrong, error, text in (
        ({"target": "model"}, TypeError, r"target must be .* not str"),
        ({"iterator": [1, 2]}, TypeError, "iterator must be an iterator, not list"),
        ({"iterator": SerialIterator([1], 1)}, ValueError, "repeat=False"),
        (
            {"root": naive.size},
            ValueError,
            f"root must be from 0 to .*, not {naive.size}",
        ),
        ({"root": None}, TypeError, "root must be an integer, not None"),
        ({"progress_hook": 3}, TypeError, "progress_hook must be a function, not int"),
    ):
        arguments = {"iterator": iterator([]), "target": ScaledMean()} | wrong
        with pytest.raises(error, match=text):
            GenericMultiNodeEvaluator(naive, **arguments)
