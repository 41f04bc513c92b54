"""The multi-node evaluator gives every rank the mean over all examples."""

from __future__ import annotations

import copy
import pickle

import chainer
import numpy as np
import pytest
from chainer import reporter, training
from chainer.iterators import SerialIterator
from chainer.training import extensions

from chainermn_comm import PeerError
from chainermn_train import create_multi_node_evaluator, create_multi_node_optimizer
from tests.support.linear import ScaledMean

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
    "batches_of_rank", [lambda rank: 2, lambda rank: rank, lambda rank: 3 - rank]
)
def test_the_result_equals_that_of_one_process(comm, batches_of_rank):
    """Where ranks have equally many examples, and where they don't; one may have none."""
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


def test_no_examples_at_all_give_an_empty_result(naive):
    assert multi_node(extensions.Evaluator(iterator([]), Model()), naive)() == {}


def test_it_is_still_an_instance_of_its_class(naive):
    class Mine(extensions.Evaluator):
        default_name = "mine"

    evaluator = Mine(iterator(count_up(0, 5)), Model())
    evaluator.trigger = (3, "iteration")
    wrapped = multi_node(evaluator, naive)
    assert isinstance(wrapped, Mine)
    assert type(wrapped).__name__ == "Mine"
    assert (wrapped.default_name, wrapped.trigger) == ("mine", (3, "iteration"))
    assert not isinstance(Mine(iterator([]), Model()), type(wrapped))  # the class is untouched


def test_a_custom_evaluate_is_averaged(comm):
    """`super().evaluate()` in it is that of one rank; its own keys are averaged too."""

    class Custom(extensions.Evaluator):
        def evaluate(self):
            result = super().evaluate()
            assert result["main/loss"] == comm.rank  # of this rank alone
            observation: dict[str, float] = {}
            with reporter.report_scope(observation):
                reporter.report({"score": comm.rank}, self.get_target("main"))
            return {**result, **observation, "raw": np.float32(comm.rank), "pair": np.ones(2)}

    mine = np.full(BATCH, comm.rank, np.float32)
    result = multi_node(Custom(iterator(mine), Model()), comm)()
    mean = (comm.size - 1) / 2
    assert result["main/loss"] == result["main/score"] == result["raw"] == mean
    np.testing.assert_array_equal(result["pair"], np.ones(2))


def test_an_evaluator_that_iterates_by_itself_counts_ranks_equally(comm):
    class Alone(extensions.Evaluator):
        def __init__(self, model):
            super().__init__({"main": None}, model)

        def evaluate(self):
            return {"score": float(comm.rank)}

    assert multi_node(Alone(Model()), comm)() == {"score": (comm.size - 1) / 2}


@pytest.mark.sizes(2, 3, 4)
def test_data_sets_on_some_ranks_only_are_an_error_on_all(comm):
    class Alone(extensions.Evaluator):
        def evaluate(self):
            return {"score": 0.0}

    main = None if comm.rank == 1 else iterator(count_up(0, 5))
    with pytest.raises(ValueError, match=r"no data set on ranks \[1\]"):
        multi_node(Alone({"main": main}, Model()), comm)()


def test_a_key_that_some_ranks_report_is_the_mean_over_those(comm):
    class Custom(extensions.Evaluator):
        def evaluate(self):
            return {"last" if comm.rank == comm.size - 1 else "others": comm.rank + 1.0}

    result = multi_node(Custom(iterator(count_up(0, 5)), Model()), comm)()
    assert result["last"] == comm.size
    assert result.get("others", 0) == sum(range(1, comm.size)) / max(1, comm.size - 1)


def test_the_main_iterator_of_several_weighs(comm):
    mine, everything = share(comm, lambda rank: rank + 1)
    other = iterator(count_up(0, 100 * (comm.size - comm.rank)))
    evaluator = extensions.Evaluator({"main": iterator(mine), "other": other}, Model())
    result = multi_node(evaluator, comm)()
    np.testing.assert_allclose(result["main/loss"], everything.mean(), rtol=1e-6)


def test_it_runs_in_a_trainer_under_its_name_again_and_again(comm, tmp_path):
    """Two evaluators in one trainer, whose model is changed between the evaluations."""
    model = Model()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(lr=0.001), comm).setup(model)
    train = SerialIterator(chainer.datasets.TupleDataset(count_up(0, 4)), 2, shuffle=False)
    updater = training.StandardUpdater(train, optimizer)
    trainer = training.Trainer(updater, (2, "epoch"), out=str(tmp_path))
    mine, everything = share(comm, lambda rank: rank + 1)
    trainer.extend(multi_node(extensions.Evaluator(iterator(mine), model), comm))
    trainer.extend(multi_node(extensions.Evaluator(iterator(mine + 1), model), comm), name="test")
    log = extensions.LogReport()
    trainer.extend(log)
    trainer.run()
    assert [entry["epoch"] for entry in log.log] == [1, 2]
    weight = float(model.w.array)
    last = log.log[-1]
    np.testing.assert_allclose(last["validation/main/loss"], everything.mean() * weight, rtol=1e-5)
    np.testing.assert_allclose(last["test/main/loss"], (everything + 1).mean() * weight, rtol=1e-5)
    assert log.log[0]["validation/main/loss"] != last["validation/main/loss"]
    for other in comm.allgather_obj(last["validation/main/loss"]):
        assert other == last["validation/main/loss"]


def test_an_error_on_one_rank_is_raised_on_all_and_names_it(comm):
    last = comm.size - 1

    class Fails(extensions.Evaluator):
        fail = True

        def evaluate(self):
            if self.fail and comm.rank == last:
                raise ZeroDivisionError("no luck")
            return super().evaluate()

    evaluator = multi_node(Fails(iterator(count_up(0, 5)), Model()), comm)
    error, text = (
        (ZeroDivisionError, "no luck") if comm.rank == last else (PeerError, f"rank {last}")
    )
    with pytest.raises(error, match=text):
        evaluator()
    evaluator.fail = False
    assert evaluator()["main/loss"] == 2.0


def test_a_result_without_a_mean_is_named_on_all_ranks(naive):
    class Words(extensions.Evaluator):
        def evaluate(self):
            return {"answer": "yes"}

    with pytest.raises(TypeError, match="'answer' as str"):
        multi_node(Words(iterator(count_up(0, 5)), Model()), naive)()


@pytest.mark.sizes(2, 3, 4)
def test_shapes_that_differ_are_named_on_all_ranks(comm):
    class Ragged(extensions.Evaluator):
        def evaluate(self):
            return {"fine": 1.0, "pair": np.ones(3 if comm.rank == 1 else 2)}

    evaluator = multi_node(Ragged(iterator(count_up(0, 5)), Model()), comm)
    with pytest.raises(ValueError, match=r"'pair' .*\(2,\) on rank 0, \(3,\) on rank 1"):
        evaluator()


def test_an_evaluate_that_returns_nothing_is_told_on_all_ranks(comm):
    class Forgetful(extensions.Evaluator):
        def evaluate(self):
            return None if comm.rank == 0 else {"score": 1.0}

    evaluator = multi_node(Forgetful(iterator(count_up(0, 5)), Model()), comm)
    error = TypeError if comm.rank == 0 else PeerError
    with pytest.raises(error, match=r"must return a dict .*not None"):
        evaluator()


def test_copies_evaluate_with_the_same_communicator(comm):
    mine, everything = share(comm, lambda rank: rank + 1)
    evaluator = multi_node(extensions.Evaluator(iterator(mine), Model()), comm)
    for twin in copy.copy(evaluator), copy.deepcopy(evaluator):
        assert type(twin) is type(evaluator)
        assert twin() == evaluator()
        np.testing.assert_allclose(twin()["main/loss"], everything.mean(), rtol=1e-6)
    assert copy.deepcopy(evaluator).get_target("main") is not evaluator.get_target("main")
    with pytest.raises(TypeError, match="Evaluator can't be pickled"):
        pickle.dumps(evaluator)


def test_wrong_arguments_are_named(naive):
    evaluator = extensions.Evaluator(iterator(count_up(0, 5)), Model())
    with pytest.raises(TypeError, match=r"create_communicator.*not NoneType"):
        create_multi_node_evaluator(evaluator, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Evaluator.*not Model"):
        create_multi_node_evaluator(Model(), naive)
    multi_node(evaluator, naive)
    with pytest.raises(TypeError, match="already a multi-node evaluator"):
        create_multi_node_evaluator(evaluator, naive)
