"""The checkpointer with what has state of its own between updates: a resume gives the same bits."""

from __future__ import annotations

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import training

from chainermn_train import create_multi_node_optimizer
from tests.support.oracles.alike import alike
from tests.support.training.checkpoints import make_checkpointer, run_until
from tests.support.training.trainers import state_of

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("unsynced")]
STOP, INTERVAL = 11, 2


def make(comm, out, double_buffering, steps, scaling, dtype, background):
    np.random.seed(comm.rank)
    x = np.random.uniform(size=(10 + comm.rank, 4)).astype(
        "f2" if dtype != "f4" else "f4"
    )
    dataset = chainer.datasets.TupleDataset(x, x.sum(axis=1, keepdims=True))
    iterator = chainer.iterators.SerialIterator(dataset, 3)
    inner = chainer.optimizers.Adam()
    if dtype != "f4":
        inner.use_fp32_update()
    if scaling:
        inner.loss_scaling(interval=3)
    with chainer.using_config("dtype", np.dtype(dtype)):
        model = L.Classifier(
            L.Linear(4, 1), lossfun=chainer.functions.mean_squared_error
        )
    model.compute_accuracy = False
    optimizer = create_multi_node_optimizer(
        inner, comm, double_buffering, accumulate_steps=steps
    )
    updater = training.StandardUpdater(iterator, optimizer.setup(model))
    trainer = training.Trainer(updater, (STOP, "iteration"), out=str(out))
    checkpointer = make_checkpointer(comm, background=background)
    trainer.extend(checkpointer, trigger=(INTERVAL, "iteration"))
    return trainer, checkpointer


# Double buffering, accumulated steps, loss scaling, dtype; written in the background.
COMBINED = [
    (True, 3, False, "f4", True),
    (False, 3, True, "f2", False),
    (True, 1, True, "f2", True),
    (True, 3, True, "f2", False),
]


@pytest.mark.parametrize("options", COMBINED, ids=str)
def test_resumed_in_the_middle_of_what_is_under_way(naive, folder, options):
    whole, _ = make(naive, folder / "whole", *options)
    whole.run()
    for stop in (5, 8):  # within a group of three, and after one
        trainer, _ = make(naive, folder / str(stop), *options)
        run_until(trainer, stop)
        naive.allgather_obj(None)
        resumed, checkpointer = make(naive, folder / str(stop), *options)
        begin = checkpointer.maybe_load(resumed)
        assert begin == stop - stop % INTERVAL
        resumed.run()
        assert alike(state_of(resumed.updater), state_of(whole.updater))
