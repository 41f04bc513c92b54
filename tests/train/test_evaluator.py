"""The multi-node evaluator gives every rank what one process gets of all examples."""

from __future__ import annotations

import copy

import chainer
import numpy as np
import pytest
from chainer import training
from chainer.iterators import MultithreadIterator, SerialIterator
from chainer.training import extensions

from chainermn_comm import PeerError
from chainermn_train import create_multi_node_evaluator, scatter_dataset
from tests.support.training.trainers import logged

pytestmark = pytest.mark.world

EXAMPLES = (np.arange(23, dtype=np.float32) - 3) ** 2


class Right(chainer.Chain):
    """Reports, of a batch of numbers, their mean and how many of them are above 100."""

    def __call__(self, x):
        above = (x > 100).mean(dtype=x.dtype)
        chainer.report({"mean": chainer.functions.mean(x), "above": above}, self)


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
        np.testing.assert_allclose(result[key], value, rtol=1e-6, err_msg=key)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("count", [23, 2, 0])
@pytest.mark.parametrize("batch", [1, 4, 30])
def test_the_result_is_that_of_all_examples(naive, batch, count):
    """Whatever the length of a batch, also where ranks have no examples."""
    examples = EXAMPLES[:count]
    result = evaluated(naive, examples, batch)
    assert_close(result, truth(examples) if count else {})


class Bare:
    """An iterator, without what Chainer's iterators have beside `__next__`."""

    def __init__(self, part):
        self.rest = list(part)

    def __iter__(self):
        return self

    def __next__(self):
        if not self.rest:
            raise StopIteration
        batch, self.rest = self.rest[:4], self.rest[4:]
        return batch

    def finalize(self):
        pass


ITERATORS = {
    "threads": lambda part: MultithreadIterator(part, 4, repeat=False, n_threads=1),
    "bare": Bare,
}


@pytest.mark.filterwarnings("ignore:This iterator does not have the reset method")
@pytest.mark.parametrize("kind", ITERATORS)
def test_any_iterator_will_do_again_and_again(comm, kind):
    part = scatter_dataset(EXAMPLES, comm, force_equal_length=False)
    evaluator = extensions.Evaluator({"main": ITERATORS[kind](part)}, Right())
    create_multi_node_evaluator(evaluator, comm)
    for _ in range(2):
        assert_close(evaluator(), truth(EXAMPLES))
    evaluator.finalize()


CONVERTERS = {
    "tuple": lambda batch, device: (np.stack(batch),),
    "dict": lambda batch, device: {"x": np.stack(batch)},
    # As for sequences: the batch is as long as its columns are not.
    "columns of another length": lambda batch, device: (np.stack([batch, batch]),),
}


@pytest.mark.parametrize("kind", CONVERTERS)
def test_a_converter_may_return_any_kind(comm, kind):
    result = evaluated(comm, converter=CONVERTERS[kind], device="@numpy")
    assert_close(result, truth(EXAMPLES))


def test_the_hook_and_the_function_are_called_as_by_chainer(comm):
    """Several targets report; the hook gets the evaluator that the user has."""
    model, other, hooked = Right(), Right(), []

    def function(x):
        assert not chainer.config.train
        assert not chainer.config.enable_backprop
        model(x)
        other(-x)

    part = scatter_dataset(EXAMPLES, comm, force_equal_length=False)
    evaluator = extensions.Evaluator(
        serial(part),
        {"main": model, "other": other},
        eval_hook=hooked.append,
        eval_func=function,
    )
    create_multi_node_evaluator(evaluator, comm)
    expected = {"other/mean": -EXAMPLES.mean(), "other/above": 0}
    assert_close(evaluator(), truth(EXAMPLES) | expected)
    assert hooked == [evaluator]
    assert evaluator.eval_func is function


def test_a_weight_that_the_model_reports_goes_before_the_number_of_examples(comm):
    """As in Chainer: of a pair, the second is the weight. Weights of 0 count nothing."""

    def function(x):
        small = x[x < 50]
        mean = small.mean() if len(small) else 0.0
        weight = chainer.Variable(np.array(len(small)))
        chainer.report({"small": (mean, weight), "none": (1.0, 0)})

    expected = {"small": EXAMPLES[EXAMPLES < 50].mean()}
    assert_close(evaluated(comm, eval_func=function), expected)


OF_TYPES = {
    "float": float,
    "integer": np.int64,
    "float16": np.float16,
    "variable": lambda value: chainer.Variable(np.array(value, np.float16)),
}


@pytest.mark.parametrize("kind", OF_TYPES)
def test_numbers_of_any_type_are_added_up_in_float64(comm, kind):
    """40,000 times 3 is too large for float16. What is no number is left out."""

    def function(x):
        others = {"array": x, "none": None, "list": [1]}
        chainer.report({"value": OF_TYPES[kind](3), **others})

    result = evaluated(comm, np.zeros(40_000, np.float32), 100, eval_func=function)
    assert result == {"value": 3}
    assert isinstance(result["value"], float)


def test_an_array_that_is_changed_later_counts_as_it_was(comm):
    """A model may report from memory that it uses again."""
    memory = np.zeros(1, np.float32)

    def function(x):
        memory[0] = x.mean()
        chainer.report({"mean": memory.reshape(())})

    result = evaluated(comm, eval_func=function)
    assert_close(result, {"mean": EXAMPLES.mean()})


def test_an_evaluate_of_the_users_is_weighted_by_the_examples_of_ranks(comm):
    """What it makes of its batches is its own matter; `super().evaluate()` means them."""
    alone = []

    class Own(extensions.Evaluator):
        def evaluate(self):
            alone.append(super().evaluate()["main/mean"])
            return {"mean": alone[0]}

    part = scatter_dataset(EXAMPLES, comm, force_equal_length=False)
    evaluator = Own(serial(part), Right())
    assert create_multi_node_evaluator(evaluator, comm) is evaluator
    assert type(evaluator) is Own
    counts = comm.allgather_obj(len(part))
    result = evaluator()
    expected = np.average(comm.allgather_obj(alone[0]), weights=counts)
    np.testing.assert_allclose(result["mean"], expected, rtol=1e-6)


def returning(result, comm, main=None):
    """Of an evaluator of which each rank's `evaluate` returns this, and which may iterate."""

    class Returns(extensions.Evaluator):
        def evaluate(self):
            return result

    evaluator = Returns({"main": main}, Right())
    return create_multi_node_evaluator(evaluator, comm)()


def test_means_have_the_types_of_the_values(comm):
    """As in Chainer 7."""
    values = {
        "int": 1,
        "float32": np.float32(1),
        "array": np.ones(2, np.float16),
        "variable": chainer.Variable(np.ones((), np.float32)),
    }
    result = returning(values, comm)
    types = {key: type(value) for key, value in result.items()}
    assert list(types.values()) == [float, np.float32, np.ndarray, chainer.Variable]
    assert (result["array"].dtype, result["variable"].dtype) == (np.float16, np.float32)


class Score(training.Extension):
    """As in Chainer 7: an extension that is no Evaluator."""

    def __init__(self, score):
        self.score = score

    def __call__(self, trainer):
        chainer.report({f"{self.name}/score": self.evaluate()["score"]})

    def evaluate(self):
        return {"score": self.score}


def of_instance(score):
    evaluator = extensions.Evaluator({}, Right())
    evaluator.evaluate = lambda: {"score": score}
    return evaluator


ANYTHING = {
    "an extension": Score,
    "a method of the instance": of_instance,
}


@pytest.mark.parametrize("kind", ANYTHING)
def test_anything_with_evaluate_becomes_multi_node(comm, kind):
    """Where it iterates by itself, ranks count equally."""
    evaluator = ANYTHING[kind](float(comm.rank))
    create_multi_node_evaluator(evaluator, comm)
    mean = {"score": (comm.size - 1) / 2}
    assert evaluator.evaluate() == copy.deepcopy(evaluator).evaluate() == mean


def test_a_deep_copy_evaluates_its_own(naive):
    evaluator = create_multi_node_evaluator(Score(1.0), naive)
    twin = copy.deepcopy(evaluator)
    twin.score = 2.0
    assert (evaluator.evaluate(), twin.evaluate()) == ({"score": 1}, {"score": 2})


def test_a_key_that_some_ranks_report_is_the_mean_over_those(comm):
    key = "last" if comm.rank == comm.size - 1 else "others"
    result = returning({key: comm.rank + 1.0}, comm, serial([1]))
    assert result["last"] == comm.size
    assert result.get("others", 0) == sum(range(1, comm.size)) / max(1, comm.size - 1)


def test_results_without_a_mean_are_told_on_all_ranks(comm):
    with pytest.raises(TypeError, match="'answer' as str"):
        returning({"answer": "yes"}, comm)
    error = TypeError if comm.rank == 0 else PeerError
    with pytest.raises(error, match=r"must return a dict .*not None"):
        returning(None if comm.rank == 0 else {"score": 1.0}, comm)


@pytest.mark.sizes(2, 3, 4)
def test_what_differs_between_ranks_is_told_on_all_of_them(comm):
    with pytest.raises(ValueError, match=r"'pair' in shapes .*\(2,\), \(3,\)"):
        returning({"fine": 1.0, "pair": np.ones(3 if comm.rank == 1 else 2)}, comm)
    with pytest.raises(ValueError, match=r"no data set on ranks \[1\]"):
        returning({"score": 0.0}, comm, None if comm.rank == 1 else serial([1]))


def test_it_runs_in_a_trainer_under_its_name_again_and_again(comm, trainer_for):
    """Two evaluators in one trainer, whose model is changed between the evaluations."""
    trainer = trainer_for(comm, (2, "epoch"))
    model = trainer.updater.get_optimizer("main").target
    examples = np.arange(comm.rank + 1, dtype=np.float32)
    for name in "validation", "test":
        evaluator = extensions.Evaluator(serial(examples), model)
        evaluator = create_multi_node_evaluator(evaluator, comm)
        trainer.extend(evaluator, name=name)
    first, last = logged(trainer, (1, "epoch"))
    everything = np.concatenate(comm.allgather_obj(examples))
    for key in "validation/main/loss", "test/main/loss":
        expected = everything.mean() * float(model.w.array)
        np.testing.assert_allclose(last[key], expected, rtol=1e-5)
    assert comm.size == 1 or first["test/main/loss"] != last["test/main/loss"]


def test_wrong_arguments_are_named(naive):
    evaluator = extensions.Evaluator(serial([1]), Right())
    with pytest.raises(TypeError, match=r"Evaluator.*not Right"):
        create_multi_node_evaluator(Right(), naive)
    create_multi_node_evaluator(evaluator, naive)
    with pytest.raises(TypeError, match="already a multi-node evaluator"):
        create_multi_node_evaluator(evaluator, naive)
