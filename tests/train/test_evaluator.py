"""The multi-node evaluator gives every rank what one process gets of all examples."""

from __future__ import annotations

import warnings
from copy import deepcopy

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import Chain, Variable, report
from chainer.iterators import SerialIterator
from chainer.training import Extension, extensions
from numpy.testing import assert_allclose

from chainermn_modelparallel import ColumnParallelLinear
from chainermn_train import create_multi_node_evaluator, scatter_dataset
from tests.support.oracles.raised import raises_on_all

pytestmark = pytest.mark.world

EXAMPLES = (np.arange(23, dtype=np.float32) - 3) ** 2


class Right(Chain):
    """Reports, of a batch of numbers, their mean and how many of them are above 100."""

    def __call__(self, x):
        above = (x > 100).mean(dtype=x.dtype)
        report({"mean": chainer.functions.mean(x), "above": above}, self)


def truth(examples):
    return {"main/mean": examples.mean(), "main/above": (examples > 100).mean()}


def serial(part, batch=4, **options):
    return SerialIterator(part, batch, repeat=False, shuffle=False, **options)


def evaluated(comm, examples=EXAMPLES, batch=4, cls=extensions.Evaluator, **options):
    """What each rank gets from an evaluator over its part."""
    part = scatter_dataset(examples, comm, force_equal_length=False)
    evaluator = cls(serial(part, batch), Right(), **options)
    result = create_multi_node_evaluator(evaluator, comm)()
    assert comm.allgather_obj(result) == [result] * comm.size  # the same bits
    return result


def assert_close(result, expected):
    assert set(result) == set(expected)
    for key, value in expected.items():
        assert_allclose(result[key], value, rtol=1e-6, err_msg=key)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("count", [23, 2, 0])
@pytest.mark.parametrize("batch", [1, 4, 30])
def test_the_result_is_that_of_all_examples(naive, batch, count):
    """Whatever the length of a batch, also where ranks have no examples."""
    examples = EXAMPLES[:count]
    result = evaluated(naive, examples, batch)
    expected = {}
    if count:
        expected = truth(examples)
    assert_close(result, expected)


def test_a_batch_counts_by_its_length_and_not_by_that_of_its_columns(comm):

    def stack(batch, device):
        return {"x": np.stack([batch, batch])}

    result = evaluated(comm, converter=stack)
    assert_close(result, truth(EXAMPLES))


def test_the_hook_and_the_function_are_called_as_by_chainer(comm):
    """The hook gets the evaluator that the user has.

    Of a pair that a model reports, the second is the weight; weights of 0 count nothing.
    """
    hooked = []

    def function(x):
        assert not chainer.config.train
        assert not chainer.config.enable_backprop
        small = x[x < 50]
        mean = 0.0
        if len(small):
            mean = small.mean()
        weight = Variable(np.array(len(small)))
        report({"small": (mean, weight), "none": (1.0, 0)})

    result = evaluated(comm, eval_func=function, eval_hook=hooked.append)
    assert_close(result, {"small": EXAMPLES[EXAMPLES < 50].mean()})
    (evaluator,) = hooked
    assert evaluator.eval_func is function
    assert evaluator.eval_hook is not None


def test_numbers_of_any_type_are_added_up_in_float64(comm):
    """40,000 times 3 is too large for float16. What is no number is left out."""
    memory = np.zeros((), np.float32)  # which a model may use again
    half = np.float16(3)
    numbers = {"integer": 3, "half": half, "variable": Variable(np.array(half))}

    def function(x):
        memory[...] = x.mean()
        report({**numbers, "memory": memory, "none": None, "list": [1]})

    whole = np.arange(40_000, dtype=np.float32)
    result = evaluated(comm, whole, 1000, eval_func=function)
    assert result.pop("memory") == pytest.approx(39_999 / 2)
    assert result == dict.fromkeys(numbers, 3.0)
    for value in result.values():
        assert isinstance(value, float)


def test_an_evaluate_of_the_users_is_weighted_by_the_examples_of_ranks(comm):
    """What it makes of its batches is its own matter; `super().evaluate()` means them."""
    alone = []

    class Own(extensions.Evaluator):
        def evaluate(self):
            alone.append(super().evaluate()["main/mean"])
            alone.append(len(self.get_iterator("main").dataset))
            return {"mean": alone[0]}

    result = evaluated(comm, cls=Own)
    values, counts = zip(*comm.allgather_obj(alone), strict=True)
    expected = np.average(values, weights=counts)
    assert_allclose(result["mean"], expected, rtol=1e-6)


def returning(result, comm, main=None):
    """Of an evaluator of which each rank's `evaluate` returns this, and which may iterate."""

    class Returns(extensions.Evaluator):
        def evaluate(self):
            return result

    evaluator = Returns({"main": main}, Right())
    return create_multi_node_evaluator(evaluator, comm)()


class Score(Extension):
    """As in Chainer 7: an extension that is no Evaluator."""

    def __init__(self, score):
        self.score = score

    def evaluate(self):
        return {"score": self.score}


def of_instance(score):
    evaluator = extensions.Evaluator({}, Right())
    evaluator.evaluate = lambda: {"score": evaluator.score}
    evaluator.score = score
    return evaluator


@pytest.mark.parametrize("kind", [Score, of_instance])
def test_anything_with_evaluate_becomes_multi_node(comm, kind):
    """Where it iterates by itself, ranks count equally. A deep copy evaluates its own."""
    evaluator = kind(float(comm.rank))
    assert create_multi_node_evaluator(evaluator, comm) is evaluator
    twin = deepcopy(evaluator)
    if kind is Score:
        twin.score = 2.0
        assert twin.evaluate() == {"score": 2}
    assert evaluator.evaluate() == {"score": (comm.size - 1) / 2}


def test_a_key_that_some_ranks_report_is_the_mean_over_those(comm):
    key = "others"
    if comm.rank == comm.size - 1:
        key = "last"
    result = returning({key: comm.rank + 1.0}, comm, serial([1]))
    assert result["last"] == comm.size
    mean = sum(range(1, comm.size)) / max(1, comm.size - 1)
    assert result.get("others", 0) == mean


def test_results_without_a_mean_are_told_on_all_ranks(comm):
    with pytest.raises(TypeError, match="'answer' as str"):
        returning({"answer": "yes"}, comm)
    returned = {"score": 1.0}
    if comm.rank == 0:
        returned = None
    with raises_on_all(comm.rank == 0, TypeError, r"must return a dict .*not None"):
        returning(returned, comm)
    if comm.size > 1:
        with pytest.raises(ValueError, match=r"'pair' in shapes .*\(2,\), \(3,\)"):
            returning({"fine": 1.0, "pair": np.ones(min(comm.rank, 1) + 2)}, comm)
        if comm.rank == 1:
            examples = None
        else:
            examples = serial([1])
        with pytest.raises(ValueError, match=r"'score', in rank order: \[1, None"):
            returning({"score": 0.0}, comm, examples)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("kind", ["alone", "given to all", "in parts", "lazy"])
def test_models_that_differ_are_warned_of_once(naive, kind):
    """As under an optimizer that isn't a multi-node one; not parts, nor what has no values."""
    np.random.seed(naive.rank)
    model = chainer.Sequential(L.Linear(1, 2))
    if kind == "lazy":
        model = chainer.Sequential(L.Linear(None, 2))
    if kind == "given to all":
        naive.bcast_data(model)
    if kind == "in parts":
        model = chainer.Sequential(ColumnParallelLinear(1, 2 * naive.size, naive))

    def function(x):
        report({"mean": x.mean()})

    evaluator = extensions.Evaluator(serial(EXAMPLES), model, eval_func=function)
    create_multi_node_evaluator(evaluator, naive)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evaluator()
        evaluator()
    texts = [str(each.message) for each in caught]
    assert len(texts) == (kind == "alone" and naive.rank == 0)
    assert all("over different models: value of parameter /0/" in it for it in texts)


@pytest.mark.sizes(2)
def test_that_warning_is_raised_on_all_ranks_where_it_is_an_error(naive):
    np.random.seed(naive.rank)
    evaluator = extensions.Evaluator(serial([]), Chain(link=L.Linear(1, 2)))
    create_multi_node_evaluator(evaluator, naive)
    raised = raises_on_all(naive.rank == 0, RuntimeWarning, "over different models")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with raised:
            evaluator()


def test_wrong_arguments_are_named(naive):
    evaluator = extensions.Evaluator(serial([1]), Right())
    with pytest.raises(TypeError, match=r"Evaluator.*not Right"):
        create_multi_node_evaluator(Right(), naive)
    create_multi_node_evaluator(evaluator, naive)
    with pytest.raises(TypeError, match="already a multi-node evaluator"):
        create_multi_node_evaluator(evaluator, naive)
