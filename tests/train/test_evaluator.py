"""The multi-node evaluator gives every rank the mean over all examples."""

from __future__ import annotations

import copy
from unittest import mock

import chainer
import numpy as np
import pytest
from chainer import reporter, training
from chainer.iterators import SerialIterator
from chainer.training import extensions

from chainermn_comm import PeerError
from chainermn_train import create_multi_node_evaluator
from tests.support.training.linear import ScaledMean
from tests.support.training.trainers import logged

pytestmark = pytest.mark.world

BATCH = 5


class Model(ScaledMean):
    """Reports the mean of its inputs, and of their squares."""

    def __call__(self, x):
        chainer.report({"square": (x * x).mean()}, self)
        return super().__call__(x)


def iterator(examples):
    return SerialIterator(examples, BATCH, repeat=False, shuffle=False)


def count_up(first, last):
    return np.arange(first, last, dtype=np.float32)


def share(comm, batches_of_rank):
    """The examples of this rank, and those of all ranks, in full batches."""
    ends = np.cumsum([0, *(BATCH * batches_of_rank(rank) for rank in range(comm.size))])
    return count_up(ends[comm.rank], ends[comm.rank + 1]), count_up(0, ends[-1])


def multi_node(evaluator, comm):
    wrapped = create_multi_node_evaluator(evaluator, comm)
    assert wrapped is evaluator
    return wrapped


@pytest.mark.parametrize(
    "batches_of_rank",
    [lambda rank: 2, lambda rank: rank, lambda rank: 3 - rank, lambda rank: 0],
)
def test_the_result_equals_that_of_one_process(comm, batches_of_rank):
    """Where ranks have equally many examples, and where they don't; some or all may have none."""
    mine, everything = share(comm, batches_of_rank)
    model = Model()
    result = multi_node(extensions.Evaluator(iterator(mine), model), comm)()
    if len(everything):
        expected = extensions.Evaluator(iterator(everything), model)()
        assert set(result) == {"main/loss", "main/square"} == set(expected)
        for key, value in expected.items():
            np.testing.assert_allclose(result[key], value, rtol=1e-6)
    else:
        assert result == {}
    assert comm.allgather_obj(result) == [result] * comm.size  # the same bits


def test_it_is_still_an_instance_of_its_class(naive):
    class Mine(extensions.Evaluator):
        default_name = "mine"

    evaluator = Mine(iterator(count_up(0, 5)), Model())
    evaluator.trigger = (3, "iteration")
    wrapped = multi_node(evaluator, naive)
    assert isinstance(wrapped, Mine)
    assert type(wrapped).__name__ == "Mine"
    assert (wrapped.default_name, wrapped.trigger) == ("mine", (3, "iteration"))
    # The class is untouched.
    assert not isinstance(Mine(iterator([]), Model()), type(wrapped))


def test_a_custom_evaluate_is_averaged(comm):
    """`super().evaluate()` in it is that of one rank; its own keys are averaged too."""

    class Custom(extensions.Evaluator):
        def evaluate(self):
            result = super().evaluate()
            assert result["main/loss"] == comm.rank  # of this rank alone
            observation: dict[str, float] = {}
            with reporter.report_scope(observation):
                reporter.report({"score": comm.rank}, self.get_target("main"))
            return {
                **result,
                **observation,
                "raw": np.float32(comm.rank),
                "pair": np.ones(2),
            }

    mine = np.full(BATCH, comm.rank, np.float32)
    result = multi_node(Custom(iterator(mine), Model()), comm)()
    mean = (comm.size - 1) / 2
    assert result["main/loss"] == result["main/score"] == result["raw"] == mean
    np.testing.assert_array_equal(result["pair"], np.ones(2))


def returning(result, comm, main=None):
    """Of an evaluator of which each rank's `evaluate` returns this, and which may iterate."""

    class Returns(extensions.Evaluator):
        def evaluate(self):
            return result

    return multi_node(Returns({"main": main}, Model()), comm)()


def test_means_have_the_types_of_the_values(comm):
    """As in Chainer 7."""
    values = {
        "float": 1.0,
        "int": 1,
        "float32": np.float32(1),
        "array": np.ones(2, np.float16),
        "variable": chainer.Variable(np.ones((), np.float32)),
    }
    result = returning(values, comm)
    assert {key: type(value) for key, value in result.items()} == {
        "float": float,
        "int": float,
        "float32": np.float32,
        "array": np.ndarray,
        "variable": chainer.Variable,
    }
    assert (result["array"].dtype, result["variable"].dtype) == (np.float16, np.float32)


def test_an_evaluator_that_iterates_by_itself_counts_ranks_equally(comm):
    assert returning({"score": float(comm.rank)}, comm) == {
        "score": (comm.size - 1) / 2
    }


def test_anything_with_evaluate_becomes_multi_node(comm, trainer_for):
    """As in Chainer 7: an extension that is no Evaluator."""

    class Score(training.Extension):
        trigger = (1, "epoch")

        def __call__(self, trainer):
            chainer.report(
                {f"{self.name}/{key}": each for key, each in self.evaluate().items()}
            )

        def evaluate(self):
            return {"score": float(comm.rank)}

    score = multi_node(Score(), comm)
    assert isinstance(score, Score)
    (entry,) = logged(trainer_for(comm, (1, "epoch"), score), (1, "epoch"))
    assert entry["Score/score"] == (comm.size - 1) / 2


def test_an_evaluate_of_the_instance_is_averaged(comm):
    evaluator = extensions.Evaluator({}, Model())
    evaluator.evaluate = lambda: {"score": float(comm.rank)}
    multi_node(evaluator, comm)
    for each in evaluator, copy.deepcopy(evaluator):
        assert each.evaluate() == {"score": (comm.size - 1) / 2}


class Intercepting(training.Extension):
    """Assignments go elsewhere, as to an object that it wraps; so does what isn't found."""

    def __init__(self, score):
        vars(self)["elsewhere"] = {"evaluate": lambda: {"score": score}}

    def __setattr__(self, name, value):
        self.elsewhere[name] = value

    def __getattr__(self, name):
        try:
            return vars(self)["elsewhere"][name]
        except KeyError:
            raise AttributeError(name) from None


class Slots(training.Extension):
    __slots__ = ("score",)

    def __init__(self, score):
        self.score = score

    def evaluate(self):
        return {"score": self.score}


class NoWeakReferences:
    __slots__ = ("__dict__",)
    __init__, evaluate = Slots.__init__, Slots.evaluate


OF_ANY_CLASS = {
    "mock": lambda score: mock.MagicMock(evaluate=lambda: {"score": score}),
    "mock of a mock": lambda score: mock.Mock(
        **{"evaluate.return_value": {"score": score}}
    ),
    "mock of a class": lambda score: mock.MagicMock(
        spec=extensions.Evaluator, evaluate=lambda: {"score": score}
    ),
    "own __setattr__": Intercepting,
    "slots": Slots,  # which aren't copied
    "no weak references": NoWeakReferences,
}


@pytest.mark.parametrize("kind", OF_ANY_CLASS)
def test_a_class_that_takes_no_other_class_is_averaged_too(comm, kind):
    evaluator = OF_ANY_CLASS[kind](float(comm.rank))
    cls = evaluator.__class__
    multi_node(evaluator, comm)
    for each in (evaluator, *[copy.copy(evaluator)] * (cls is not Slots)):
        assert each.evaluate() == {"score": (comm.size - 1) / 2}
        assert isinstance(each, cls)


def test_an_object_without_a_dict_is_told(naive):
    class Bare:
        __slots__ = ()

        def evaluate(self):
            return {"score": 1.0}

    with pytest.raises(
        TypeError, match=r"Bare can't become .*__slots__ and no __dict__"
    ):
        create_multi_node_evaluator(Bare(), naive)


def test_a_key_that_some_ranks_report_is_the_mean_over_those(comm):
    key = "last" if comm.rank == comm.size - 1 else "others"
    result = returning({key: comm.rank + 1.0}, comm, iterator(count_up(0, 5)))
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
    with pytest.raises(
        ValueError, match=r"'pair' .*\(2,\) on rank 0, \(3,\) on rank 1"
    ):
        returning({"fine": 1.0, "pair": np.ones(3 if comm.rank == 1 else 2)}, comm)
    with pytest.raises(ValueError, match=r"no data set on ranks \[1\]"):
        returning(
            {"score": 0.0}, comm, None if comm.rank == 1 else iterator(count_up(0, 5))
        )


def test_the_main_iterator_of_several_weighs(comm):
    mine, everything = share(comm, lambda rank: rank + 1)
    other = iterator(count_up(0, 100 * (comm.size - comm.rank)))
    evaluator = extensions.Evaluator({"main": iterator(mine), "other": other}, Model())
    result = multi_node(evaluator, comm)()
    np.testing.assert_allclose(result["main/loss"], everything.mean(), rtol=1e-6)


def test_it_runs_in_a_trainer_under_its_name_again_and_again(comm, trainer_for):
    """Two evaluators in one trainer, whose model is changed between the evaluations."""
    model = Model()
    mine, everything = share(comm, lambda rank: rank + 1)
    trainer = trainer_for(comm, (2, "epoch"), model=model)
    trainer.extend(multi_node(extensions.Evaluator(iterator(mine), model), comm))
    trainer.extend(
        multi_node(extensions.Evaluator(iterator(mine + 1), model), comm), name="test"
    )
    first, last = logged(trainer, (1, "epoch"))
    weight = float(model.w.array)
    np.testing.assert_allclose(
        last["validation/main/loss"], everything.mean() * weight, rtol=1e-5
    )
    np.testing.assert_allclose(
        last["test/main/loss"], (everything + 1).mean() * weight, rtol=1e-5
    )
    assert first["validation/main/loss"] != last["validation/main/loss"]
    values = comm.allgather_obj(last["validation/main/loss"])
    assert values == [last["validation/main/loss"]] * comm.size


def test_wrong_arguments_are_named(naive):
    evaluator = extensions.Evaluator(iterator(count_up(0, 5)), Model())
    with pytest.raises(TypeError, match=r"Evaluator.*not Model"):
        create_multi_node_evaluator(Model(), naive)
    multi_node(evaluator, naive)
    with pytest.raises(TypeError, match="already a multi-node evaluator"):
        create_multi_node_evaluator(evaluator, naive)
