"""Evaluation gives what one process gets of all examples, on any number of ranks.

Where ``evaluate`` is Chainer's own, a batch counts by its examples, also the last one,
which is shorter.
"""

from __future__ import annotations

import chainer
import numpy as np
import pytest
from chainer.iterators import MultithreadIterator, SerialIterator
from chainer.training import extensions

from chainermn_train import create_multi_node_evaluator, scatter_dataset

pytestmark = pytest.mark.world

EXAMPLES = (np.arange(23, dtype=np.float32) - 3) ** 2


class Right(chainer.Chain):
    """Reports, of a batch of numbers, their mean and how many of them are above 100."""

    def __call__(self, x):
        above = (x > 100).mean(dtype=x.dtype)
        chainer.report({"mean": chainer.functions.mean(x), "above": above}, self)


def truth(examples):
    return {"main/mean": examples.mean(), "main/above": (examples > 100).mean()}


def serial(part, batch=4):
    return SerialIterator(part, batch, repeat=False, shuffle=False)


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
@pytest.mark.parametrize("batch", [1, 4, 7, 30])
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
    "shuffled": lambda part: SerialIterator(part, 4, repeat=False, shuffle=True),
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
    "array": lambda batch, device: np.stack(batch),
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
    targets = {"main": model, "other": other}
    evaluator = extensions.Evaluator(
        serial(part), targets, eval_hook=hooked.append, eval_func=function
    )
    create_multi_node_evaluator(evaluator, comm)
    expected = {"other/mean": -EXAMPLES.mean(), "other/above": 0}
    assert_close(evaluator(), truth(EXAMPLES) | expected)
    assert hooked == [evaluator]
    assert evaluator.eval_func is function


def test_a_value_of_some_batches_is_the_mean_over_their_examples(comm):
    """Here over those with an example above 100, wherever they are."""
    batches = comm.allgather_obj(
        [
            np.array(batch)
            for batch in serial(
                scatter_dataset(EXAMPLES, comm, force_equal_length=False)
            )
        ]
    )
    chosen = [each for rank in batches for each in rank if each.max() > 100]

    def function(x):
        if x.max() > 100:
            chainer.report({"rare": x.mean()})

    result = evaluated(comm, eval_func=function)
    assert_close(result, {"rare": np.concatenate(chosen).mean()})


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
    "int": int,
    "float16": np.float16,
    "float32": np.float32,
    "integer": np.int64,
    "0-d": lambda value: np.array(value, np.float16),
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


def test_a_progress_bar_is_drawn(naive, capfd):
    """By each rank, of its own part."""
    evaluated(naive, progress_bar=True)
    assert "validation [" in capfd.readouterr().out


def test_an_array_that_is_changed_later_counts_as_it_was(comm):
    """A model may report from memory that it uses again."""
    memory = np.zeros(1, np.float32)

    def function(x):
        memory[0] = x.mean()
        chainer.report({"mean": memory.reshape(())})

    result = evaluated(comm, eval_func=function)
    assert_close(result, {"mean": EXAMPLES.mean()})


def test_parts_that_are_made_equal_count_some_examples_twice(comm):
    """As the docstring says; a rank's number of examples is that of its part."""
    part = scatter_dataset(EXAMPLES, comm)
    dealt = np.concatenate(comm.allgather_obj(np.array(part[:])))
    evaluator = extensions.Evaluator(serial(part), Right())
    assert_close(create_multi_node_evaluator(evaluator, comm)(), truth(dealt))


def test_an_evaluate_of_the_users_is_weighted_by_the_examples_of_ranks(comm):
    """What it makes of its batches is its own matter; `super().evaluate()` means them."""
    alone = []

    class Own(extensions.Evaluator):
        def evaluate(self):
            alone.append(super().evaluate()["main/mean"])
            return {"mean": alone[0]}

    result = evaluated(comm, cls=Own)
    counts = [len(EXAMPLES[rank :: comm.size]) for rank in range(comm.size)]
    expected = np.average(comm.allgather_obj(alone[0]), weights=counts)
    np.testing.assert_allclose(result["mean"], expected, rtol=1e-6)
