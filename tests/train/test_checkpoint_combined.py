"""The checkpointer with what has state of its own between updates: a resume gives the same bits."""

from __future__ import annotations

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import training

from chainermn_train import create_multi_node_checkpointer, create_multi_node_optimizer, durable
from chainermn_train.npz_state import capture

pytestmark = pytest.mark.world
STOP, INTERVAL = 11, 2


def make(comm, out, double_buffering, steps, scaling, dtype, background):
    np.random.seed(comm.rank)
    x = np.random.uniform(size=(10 + comm.rank, 4)).astype("f2" if dtype != "f4" else "f4")
    dataset = chainer.datasets.TupleDataset(x, x.sum(axis=1, keepdims=True))
    iterator = chainer.iterators.SerialIterator(dataset, 3)
    inner = chainer.optimizers.Adam()
    if dtype != "f4":
        inner.use_fp32_update()
    if scaling:
        inner.loss_scaling(interval=3)
    with chainer.using_config("dtype", np.dtype(dtype)):
        model = L.Classifier(L.Linear(4, 1), lossfun=chainer.functions.mean_squared_error)
    model.compute_accuracy = False
    optimizer = create_multi_node_optimizer(inner, comm, double_buffering, accumulate_steps=steps)
    updater = training.StandardUpdater(iterator, optimizer.setup(model))
    trainer = training.Trainer(updater, (STOP, "iteration"), out=str(out))
    checkpointer = create_multi_node_checkpointer("run", comm, background=background)
    trainer.extend(checkpointer, trigger=(INTERVAL, "iteration"))
    return trainer, checkpointer


def bits(trainer) -> dict[str, bytes]:
    """Of the model, the optimizer with all that is under way, and the iterator."""
    return {name: array.tobytes() for name, array in capture(trainer.updater).items()}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("double_buffering", "steps", "scaling", "dtype"),
    [(True, 3, False, "f4"), (False, 3, True, "f2"), (True, 1, True, "f2"), (True, 3, True, "f2")],
)
def test_resumed_in_the_middle_of_what_is_under_way(
    naive, world, tmp_path, monkeypatch, double_buffering, steps, scaling, dtype, background
):
    monkeypatch.setattr(durable.os, "fsync", lambda _: None)
    folder = world.bcast(tmp_path)
    options = (double_buffering, steps, scaling, dtype, background)
    whole, _ = make(naive, folder / "whole", *options)
    whole.run()
    for stop in (5, 8):  # within a group of three, and after one

        def fail(trainer, stop=stop):
            if trainer.updater.iteration == stop:
                raise InterruptedError

        trainer, _ = make(naive, folder / str(stop), *options)
        trainer.extend(fail, name="fail", trigger=(1, "iteration"), priority=-1000)
        with pytest.raises(InterruptedError):
            trainer.run(show_loop_exception_msg=False)
        naive.allgather_obj(None)
        resumed, checkpointer = make(naive, folder / str(stop), *options)
        begin = checkpointer.maybe_load(resumed)
        assert begin == (stop - stop % INTERVAL) - (INTERVAL if background else 0)
        resumed.run()
        assert bits(resumed) == bits(whole)
