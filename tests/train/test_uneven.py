"""Uneven parts of a data set, empty ones too, give the metrics of one process over all of it."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import training
from chainer.iterators import SerialIterator
from chainer.training import extensions

from chainermn_train import (
    create_multi_node_evaluator,
    create_multi_node_optimizer,
    scatter_dataset,
    scatter_index,
)
from tests.support.pairwise import tiered

pytestmark = pytest.mark.world

BATCH = 4  # of training, which goes on when a rank evaluates nothing
EPOCHS = 2


@pytest.fixture(autouse=True)
def double_precision():
    with chainer.using_config("dtype", np.float64):
        yield


def examples(count):
    """Rows x of 6 numbers, and t of 3 classes."""
    random = np.random.RandomState(count)
    x = random.standard_normal((count, 6))
    return chainer.datasets.TupleDataset(x, random.randint(0, 3, count).astype(np.int32))


class Net(chainer.Chain):
    """The same on every rank and in one process."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.hidden = L.Linear(6, 5, initialW=weights(5, 6))
            self.out = L.Linear(5, 3, initialW=weights(3, 5))

    def __call__(self, x):
        return self.out(F.tanh(self.hidden(x)))


def weights(*shape):
    return np.random.RandomState(sum(shape)).standard_normal(shape)


def validation(dataset, batch, model):
    iterator = SerialIterator(dataset, batch, repeat=False, shuffle=False)
    return extensions.Evaluator(iterator, model)


def full_batch(part):
    """A size that divides what the rank has, as Chainer's Evaluator averages over batches."""
    return next((n for n in (5, 3, 2) if len(part) % n == 0), 1)


def metrics(log):
    return [{k: v for k, v in entry.items() if k.startswith("validation")} for entry in log.log]


def run(model, updater, evaluator, out):
    trainer = training.Trainer(updater, (EPOCHS, "epoch"), out=str(out))
    trainer.extend(evaluator)
    log = extensions.LogReport()
    trainer.extend(log)
    trainer.run()
    return metrics(log)


def updater(optimizer, train):
    """Each rank trains on the same examples, so that the mean gradient is one process's."""
    iterator = SerialIterator(train, BATCH, shuffle=False)
    return training.StandardUpdater(iterator, optimizer)


def expected(count, tmp_path):
    """What one process over the whole set reports, one example a batch: any batch is full."""
    if not count:
        return [{}] * EPOCHS  # Chainer's Evaluator fails without examples
    model = L.Classifier(Net())
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    evaluator = validation(examples(count), 1, model)
    return run(model, updater(optimizer, examples(8)), evaluator, tmp_path / "one")


@pytest.mark.parametrize(
    ("count", "shuffle"),
    tiered(
        [(0, False), (1, True), (2, False), (5, True), (23, False)],
        [0, 1, 2, 3, 5, 23, 60],
        [False, True],
    ),
)
def test_metrics_in_a_trainer_are_those_of_one_process(comm, count, shuffle, tmp_path):
    whole = examples(count) if comm.rank == 0 else None
    part = scatter_dataset(whole, comm, shuffle=shuffle, seed=1, force_equal_length=False)
    assert sum(comm.allgather_obj(len(part))) == count  # no example twice
    if count < comm.size:
        assert 0 in comm.allgather_obj(len(part))
    model = L.Classifier(Net())
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm).setup(model)
    evaluator = create_multi_node_evaluator(validation(part, full_batch(part), model), comm)
    mine = run(model, updater(optimizer, examples(8)), evaluator, tmp_path / str(comm.rank))
    everybodys = comm.allgather_obj(mine)
    assert everybodys == [mine] * comm.size  # the same bits
    for one, reported in zip(expected(count, tmp_path / f"{comm.rank}"), mine, strict=True):
        keys = {"validation/main/loss", "validation/main/accuracy"} if count else set()
        assert one.keys() == reported.keys() == keys
        for key, value in one.items():
            np.testing.assert_allclose(reported[key], value, rtol=1e-12, atol=1e-12)


def test_nothing_at_all_on_all_ranks_but_one(comm):
    """A part may be anybody's, not only what scatter_dataset makes."""
    model = L.Classifier(Net())
    last = comm.size - 1
    whole = examples(15)
    part = whole if comm.rank == last else []
    result = create_multi_node_evaluator(validation(part, 5, model), comm)()
    one = validation(whole, 15, model)()
    for key, value in one.items():
        np.testing.assert_allclose(result[key], value, rtol=1e-12, atol=1e-12)


def test_parts_by_index_are_the_same(comm):
    for count in 0, 1, 7:
        begin, end = scatter_index(count, comm, force_equal_length=False)
        part = scatter_dataset(range(count), comm, force_equal_length=False)
        assert list(range(begin, end)) == list(part)
