"""Uneven parts of a data set, empty ones too, give the metrics of one process over all of it."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.iterators import SerialIterator
from chainer.training import extensions

from chainermn_train import (
    create_multi_node_evaluator,
    create_multi_node_optimizer,
    scatter_dataset,
)
from tests.support.plugins.pairwise import tiered
from tests.support.training.trainers import logged, trainer_over

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("double_precision")]

BATCH = 4  # of training, which goes on when a rank evaluates nothing
EPOCHS = 2


def examples(count):
    """Rows x of 6 numbers, and t of 3 classes."""
    random = np.random.RandomState(count)
    x = random.standard_normal((count, 6))
    return chainer.datasets.TupleDataset(
        x, random.randint(0, 3, count).astype(np.int32)
    )


def classifier():
    """The same on every rank and in one process."""
    np.random.seed(0)
    return L.Classifier(chainer.Sequential(L.Linear(6, 5), F.tanh, L.Linear(5, 3)))


def validation(dataset, batch, model):
    iterator = SerialIterator(dataset, batch, repeat=False, shuffle=False)
    return extensions.Evaluator(iterator, model)


def full_batch(part):
    """A size that divides what the rank has, as Chainer's Evaluator averages over batches."""
    return next((n for n in (5, 3, 2) if len(part) % n == 0), 1)


def metrics(optimizer, evaluator, out):
    """All ranks train on the same examples, so that the mean gradient is one process's."""
    trainer = trainer_over(examples(8), BATCH, optimizer, (EPOCHS, "epoch"), out)
    trainer.extend(evaluator)
    log = logged(trainer, (1, "epoch"))
    return [
        {k: v for k, v in entry.items() if k.startswith("validation")} for entry in log
    ]


def expected(count, out):
    """What one process over the whole set reports, one example a batch: any batch is full."""
    if not count:
        return [{}] * EPOCHS  # Chainer's Evaluator fails without examples
    model = classifier()
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    return metrics(optimizer, validation(examples(count), 1, model), out)


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
    part = scatter_dataset(
        whole, comm, shuffle=shuffle, seed=1, force_equal_length=False
    )
    assert sum(comm.allgather_obj(len(part))) == count  # no example twice
    if count < comm.size:
        assert 0 in comm.allgather_obj(len(part))
    model = classifier()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm).setup(
        model
    )
    evaluator = create_multi_node_evaluator(
        validation(part, full_batch(part), model), comm
    )
    mine = metrics(optimizer, evaluator, tmp_path)
    assert comm.allgather_obj(mine) == [mine] * comm.size  # the same bits
    for one, reported in zip(expected(count, tmp_path), mine, strict=True):
        keys = {"validation/main/loss", "validation/main/accuracy"} if count else set()
        assert one.keys() == reported.keys() == keys
        for key, value in one.items():
            np.testing.assert_allclose(reported[key], value, rtol=1e-12, atol=1e-12)
