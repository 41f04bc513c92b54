"""GenericMultiNodeEvaluator has one rank make a metric of everybody's outputs."""

from __future__ import annotations

from copy import deepcopy

import chainer
import numpy as np
import pytest
from chainer import Variable, report
from chainer.iterators import SerialIterator

from chainermn_comm import RankMismatchError
from chainermn_train.extensions import GenericMultiNodeEvaluator
from tests.support.oracles.raised import Awkward, raises_on_all
from tests.support.oracles.samples import alike
from tests.support.training.small_models import ScaledMean

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
    made.calc_local = calc_local
    made.aggregate = aggregate
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
    expected = median_of(comm.allgather_obj(examples(comm, own)))
    made = evaluator(comm, own, without_graphs, median_of, root=root % comm.size)
    for each in made, deepcopy(made):
        told = None
        if comm.rank == made.root:
            told = expected
        assert each(None) == told
        assert each.evaluate() == expected


def test_numbers_of_the_result_are_observed_on_all_ranks_and_no_more(comm):
    """What the model reports goes nowhere, least of all into the training's values."""
    model = ScaledMean()
    results = {"text": "no number", "variable": Variable(np.ones(()))}
    made = evaluator(comm, comm.rank, lambda x: model(x).array, lambda _: results)
    made.target = model
    reporter = chainer.Reporter()
    reporter.add_observer("main", model)
    observation = {}
    with reporter.scope(observation):
        made(None)
    assert observation == {"variable": 1}


def test_outputs_come_batch_by_batch_in_rank_order(comm):
    made = evaluator(comm, 2 * comm.rank + 1, lambda x: x[0])
    size = comm.size
    batches = [(i, rank) for i in range(size) for rank in range(size) if i <= rank]
    assert made.evaluate() == [2 * i + 100 * rank for i, rank in batches]


def test_the_root_gets_outputs_as_they_are_and_all_ranks_the_result_on_the_host(comm):
    made = evaluator(comm, 1, lambda x: {"v": ["text", Variable(x)]})
    expected = [{"v": ["text", np.float32([100 * i])]} for i in range(comm.size)]
    assert alike(made.evaluate(), expected)
    # A result that stays on the root needs not be picklable.

    def kinds_of(results):
        return (type(each["v"][1]) for each in results)

    made.aggregate = kinds_of
    found = made(None)
    if comm.rank == 0:
        kinds = {Variable}
    else:
        kinds = set()
    assert set(found or ()) == kinds


def test_a_class_written_for_chainer_7_finds_what_it_expects(comm):
    """The target may be anything; what `aggregate` reports goes to its rank's observation."""

    class Custom(GenericMultiNodeEvaluator):
        def calc_local(self, x):
            return self._targets["main"]["factor"] * x.sum()

        def aggregate(self, results):
            report({"total": sum(results)})

    seen = []
    observation = {}
    with chainer.Reporter().scope(observation):
        Custom(comm, iterator([1, 2, 3]), {"factor": 2}, progress_hook=seen.append)()
    if comm.rank == 0:
        assert observation == {"total": 12 * comm.size}
        assert seen == [[1, 2], [3]]
    else:
        assert observation == {}
        assert seen == []


def fail(*_):
    raise ValueError("no luck")


# What fails, by the step and the rank where it does.


def fail_later(x):
    if x[0] % 100 == 4:
        return fail()
    return 1


FAILURES = {
    "a later batch": (-1, {"calc_local": fail_later}),
    "aggregate": (0, {"calc_local": lambda x: 1, "aggregate": fail}),
    "pickling": (-1, {"calc_local": lambda x: Awkward("there")}),
    "unpickling": (0, {"calc_local": lambda x: Awkward("here")}),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_of_one_rank_is_raised_on_all(comm, kind):
    who, parts = FAILURES[kind]
    who %= comm.size
    wrong = comm.rank == who
    if not wrong and kind != "unpickling":
        parts = {"calc_local": lambda x: 1}
    made = evaluator(comm, 8, **parts)
    with raises_on_all(wrong, ValueError, r"no luck|does not"):
        made()
    found = evaluator(comm, 4, lambda x: 1).evaluate()
    assert found == [1] * (2 * comm.size)


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
