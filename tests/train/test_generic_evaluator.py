"""GenericMultiNodeEvaluator gives all ranks what one makes of everybody's outputs."""

from __future__ import annotations

import copy
import weakref
from collections import namedtuple

import chainer
import numpy as np
import pytest
from chainer.datasets import TupleDataset
from chainer.iterators import MultithreadIterator, SerialIterator
from chainer.training import extensions

from chainermn_comm import PeerError, RankMismatchError
from chainermn_train.extensions import GenericMultiNodeEvaluator
from tests.support.linear import ScaledMean

pytestmark = pytest.mark.world

Pair = namedtuple("Pair", "first second")


def examples(comm, count):
    return np.arange(count, dtype=np.float32) + 100 * comm.rank


def iterator(examples, batch=2):
    return SerialIterator(examples, batch, repeat=False, shuffle=False)


class Median(GenericMultiNodeEvaluator):
    """The median of all examples, which is not the mean of the ranks' medians."""

    def calc_local(self, x):
        assert not chainer.config.train
        assert not chainer.config.enable_backprop
        return x

    def aggregate(self, results):
        everything = [each for result in results for each in result.tolist()]
        return {"median": float(np.median(everything)) if everything else None}


COUNTS = [lambda rank: 5, lambda rank: 3 * rank, lambda rank: 4 - rank, lambda rank: 0]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("root", [0, -1])
def test_a_metric_that_is_no_mean_equals_that_of_one_process(comm, count, root):
    mine = examples(comm, count(comm.rank))
    everything = np.concatenate(comm.allgather_obj(mine))
    evaluator = Median(comm, iterator(mine), ScaledMean(), root=root % comm.size)
    expected = float(np.median(everything)) if len(everything) else None
    for _ in range(2):  # and again
        assert evaluator() == {"median": expected}


def test_in_a_trainer_all_ranks_log_the_result(comm, trainer_for):
    model = ScaledMean()
    trainer = trainer_for(comm, model, np.arange(4, dtype=np.float32), (2, "epoch"))
    mine = examples(comm, 2 * comm.rank + 1)
    median = float(np.median(np.concatenate(comm.allgather_obj(mine))))
    trainer.extend(Median(comm, iterator(mine), model))
    trainer.extend(Median(comm, iterator(mine), model), name="again")
    trainer.extend(GenericMultiNodeEvaluator(comm, iterator(mine), model), name="outputs")
    log = extensions.LogReport()
    trainer.extend(log)
    seen, before = [], []
    mean = lambda t: float(t.observation["main/loss"].array)  # noqa: E731
    trainer.extend(lambda t: before.append(mean(t)), name="before", priority=1000)
    trainer.extend(lambda t: seen.append(mean(t)), name="seen")
    trainer.run()
    assert [entry["validation/median"] for entry in log.log] == [median, median]
    assert [entry["again/median"] for entry in log.log] == [median, median]
    assert seen == before  # training's own values, not evaluation's


def test_outputs_come_batch_by_batch_in_rank_order(comm):
    class Listing(GenericMultiNodeEvaluator):
        def calc_local(self, x):
            return (comm.rank, x.tolist())

    mine = examples(comm, 2 * comm.rank + 1)
    result = Listing(comm, iterator(mine), ScaledMean())()
    rounds = range(comm.size)
    assert result == [
        (rank, (np.arange(2 * rank + 1) + 100.0 * rank)[2 * i : 2 * i + 2].tolist())
        for i in rounds
        for rank in range(comm.size)
        if i <= rank
    ]


def test_outputs_may_be_of_any_kind(comm):
    """Variables, wherever they are, arrive as arrays, and everything else as it is."""

    class Kinds(GenericMultiNodeEvaluator):
        def calc_local(self, x):
            v = chainer.Variable(x)
            return {"v": [v, (v, None)], "p": Pair(v, "text"), "none": None, 3: np.float16(1)}

    class Nothing(GenericMultiNodeEvaluator):
        def calc_local(self, x):
            return None

    mine = examples(comm, 2)
    result = Kinds(comm, iterator(mine), ScaledMean())()
    assert len(result) == comm.size
    for rank, each in enumerate(result):
        expected = np.arange(2, dtype=np.float32) + 100 * rank
        assert type(each["p"]) is Pair
        for array in (each["v"][0], each["v"][1][0], each["p"].first):
            assert type(array) is np.ndarray
            assert array.dtype == np.float32
            np.testing.assert_array_equal(array, expected)
        assert (each["p"].second, each["none"], each[3]) == ("text", None, np.float16(1))
    assert Nothing(comm, iterator(mine), ScaledMean())() == [None] * comm.size


def test_by_default_the_target_s_outputs_are_listed(comm):
    """The target may be a function, and batches tuples or dicts."""
    pairs = TupleDataset(examples(comm, 2), examples(comm, 2))
    got = GenericMultiNodeEvaluator(comm, iterator(pairs, 1), lambda x, y: (x + y).tolist())()
    assert sorted(got) == sorted([200.0 * r + 2 * i] for r in range(comm.size) for i in range(2))
    dicts = [{"a": np.float32(comm.rank)}]
    got = GenericMultiNodeEvaluator(comm, iterator(dicts), lambda a: a.tolist())()
    assert got == [[float(rank)] for rank in range(comm.size)]
    got = GenericMultiNodeEvaluator(comm, iterator(examples(comm, 3), 3), ScaledMean())()
    assert got == [1 + 100.0 * rank for rank in range(comm.size)]


def test_other_iterators_and_converters_serve(comm):
    threads = MultithreadIterator(list(examples(comm, 3)), 2, repeat=False, shuffle=False)
    evaluator = GenericMultiNodeEvaluator(
        comm, threads, lambda x: x, converter=lambda batch, device: (float(sum(batch)),)
    )
    expected = [1.0 + 200 * r for r in range(comm.size)] + [2.0 + 100 * r for r in range(comm.size)]
    assert evaluator() == evaluator() == expected
    evaluator.finalize()


def test_no_rank_holds_more_than_one_batch_of_outputs(comm):
    class Large:
        def __init__(self):
            self.size = 10

        def __reduce__(self):
            return int, (self.size,)

    alive: weakref.WeakSet = weakref.WeakSet()
    most = []

    class Streaming(GenericMultiNodeEvaluator):
        def calc_local(self, x):
            most.append(len(alive))
            large = Large()
            alive.add(large)
            return large

        def aggregate(self, results):
            total = 0
            for result in results:
                total += result
            return total

    assert Streaming(comm, iterator(examples(comm, 40)), ScaledMean())() == 200 * comm.size
    assert len(most) == 20
    assert max(most) <= 1


@pytest.mark.parametrize("when", ["first", "later"])
def test_an_error_in_one_rank_s_part_is_raised_on_all(comm, when):
    last = comm.size - 1

    class Fails(GenericMultiNodeEvaluator):
        def calc_local(self, x):
            if comm.rank == last and x[0] % 100 == (0 if when == "first" else 4):
                raise ZeroDivisionError("no luck")
            return 1

        def aggregate(self, results):
            try:
                return list(results)
            except Exception:  # it can't hide another rank's error
                return []

    evaluator = Fails(comm, iterator(examples(comm, 8)), ScaledMean())
    with pytest.raises(ZeroDivisionError if comm.rank == last else PeerError, match="no luck"):
        evaluator()
    comm.allgather_obj(None)  # the ranks are in step


@pytest.mark.parametrize("when", ["at once", "in between", "at the end"])
def test_an_aggregate_that_fails_or_leaves_early_keeps_nobody_waiting(comm, when):
    class Fails(GenericMultiNodeEvaluator):
        fail = True

        def aggregate(self, results):
            if when != "at once":
                next(results)
            if when == "at the end":
                for _ in results:
                    pass
            if self.fail:
                raise ZeroDivisionError("no luck")
            return "left early"

    evaluator = Fails(comm, iterator(examples(comm, 6)), lambda x: 1)
    with pytest.raises(ZeroDivisionError if comm.rank == 0 else PeerError, match="no luck"):
        evaluator()
    evaluator.fail = False
    assert evaluator() == "left early"
    comm.allgather_obj(None)


def test_what_can_not_be_sent_is_told_on_all_ranks(comm):
    class Output(GenericMultiNodeEvaluator):
        def calc_local(self, x):
            return (lambda: None) if comm.rank == comm.size - 1 else 1

    class Result(GenericMultiNodeEvaluator):
        def aggregate(self, results):
            yield from results  # a mistake: a generator

    class Loads:
        def __reduce__(self):
            return int, ("x",)  # fails where it is unpickled

    for evaluator in (
        Output(comm, iterator(examples(comm, 4)), ScaledMean()),
        Result(comm, iterator(examples(comm, 4)), ScaledMean()),
        GenericMultiNodeEvaluator(comm, iterator(examples(comm, 4)), lambda x: Loads()),
    ):
        with pytest.raises(Exception, match=r"pickle|invalid literal"):
            evaluator()
        comm.allgather_obj(None)


@pytest.mark.sizes(2, 3, 4)
def test_roots_that_differ_are_told_on_all_ranks(comm):
    evaluator = Median(comm, iterator(examples(comm, 4)), ScaledMean(), root=min(comm.rank, 1))
    with pytest.raises(RankMismatchError, match=r"different roots, in rank order \[0, 1"):
        evaluator()


def test_a_copy_has_the_same_communicator(comm):
    evaluator = Median(comm, iterator(examples(comm, 3)), ScaledMean())
    twin = copy.deepcopy(evaluator)
    assert twin.comm is comm
    assert twin.target is not evaluator.target
    assert twin() == evaluator()


def test_wrong_arguments_are_named(naive):
    it = iterator([])
    with pytest.raises(TypeError, match="GenericMultiNodeEvaluator needs a communicator"):
        GenericMultiNodeEvaluator(None, it, ScaledMean())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"target must be .* not str"):
        GenericMultiNodeEvaluator(naive, it, "model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="iterator must be an iterator, not list"):
        GenericMultiNodeEvaluator(naive, [1, 2], ScaledMean())
    with pytest.raises(ValueError, match="repeat=False"):
        GenericMultiNodeEvaluator(naive, SerialIterator([1], 1), ScaledMean())
    with pytest.raises(ValueError, match=f"root is {naive.size}"):
        GenericMultiNodeEvaluator(naive, it, ScaledMean(), root=naive.size)
