"""What the tests of checkpoints share: a trainer with state everywhere, links, and files."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions

from chainermn_train import create_multi_node_checkpointer, create_multi_node_optimizer
from chainermn_train.durable import Contents
from tests.support.killed import Model


class Noisy(chainer.Chain):
    """Its loss draws from NumPy's generator and from Python's."""

    def __init__(self, seed):
        super().__init__()
        with self.init_scope():
            self.hidden = L.Linear(4, 6, initialW=chainer.initializers.Normal(0.5, rng=rng(seed)))
            self.norm = L.BatchNormalization(6)
            self.out = L.Linear(6, 1, initialW=chainer.initializers.Normal(0.5, rng=rng(seed)))

    forward = Model.forward


def rng(seed):
    return np.random.RandomState(seed)


def make_trainer(comm, out, stop=8, seed=None, sampler=None, shared=lambda iterator: iterator):
    """A trainer of this rank's examples, with state in every place that has one."""
    random.seed(comm.rank)
    np.random.seed(comm.rank)
    x = rng(comm.rank).uniform(size=(10, 4)).astype("f4")
    dataset = chainer.datasets.TupleDataset(x, x.sum(axis=1, keepdims=True))
    options = {"order_sampler": sampler} if sampler else {"shuffle": True}
    iterator = shared(chainer.iterators.SerialIterator(dataset, 4, **options))
    model = Noisy(comm.rank if seed is None else seed)
    optimizer = create_multi_node_optimizer(chainer.optimizers.Adam(), comm).setup(model)
    trainer = training.Trainer(
        training.StandardUpdater(iterator, optimizer), (stop, "iteration"), out=str(out)
    )
    trainer.extend(extensions.ExponentialShift("alpha", 0.9), trigger=(2, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(3, "iteration")))
    return trainer, model, optimizer


def bits(model) -> dict[str, bytes]:
    return {name: param.array.tobytes() for name, param in model.namedparams()}


def files(comm, folder: Path) -> set[str]:
    """The checkpoint files there, seen by all ranks before any goes on (collective)."""
    comm.allgather_obj(None)
    found = {path.name for path in folder.iterdir()} - {"log"}
    comm.allgather_obj(None)
    return found


def generation(comm, *iterations: int) -> set[str]:
    ranks = [*range(comm.size), "commit"]
    return {f"run.{rank}.{iteration}" for rank in ranks for iteration in iterations}


def stop_at(iteration: int):
    """An extension that ends training as a failing script does."""

    @training.make_extension(priority=-1000)
    def extension(trainer):
        if trainer.updater.iteration == iteration:
            raise InterruptedError("stopped by the test")

    return extension


def run_until(trainer, iteration: int) -> None:
    trainer.extend(stop_at(iteration), name="stop")
    with pytest.raises(InterruptedError):
        trainer.run(show_loop_exception_msg=False)


def saved(comm, folder: Path, *iterations: int) -> None:
    """Generations whose link holds the number of the iteration and the rank."""
    checkpointer = create_multi_node_checkpointer("run", comm, path=folder)
    for iteration in iterations:
        checkpointer.save(link(iteration, comm.rank), iteration)


def link(*values: float) -> chainer.Link:
    made = chainer.Link()
    made.add_persistent("values", np.array(values, "f8"))
    made.add_persistent("nothing", None)
    made.add_persistent("text", "naïve")
    return made


def loaded(comm, folder: Path) -> chainer.Link:
    target = link(0, 0)
    create_multi_node_checkpointer("run", comm, path=folder).maybe_load(target)
    return target


def save_and_flush(checkpointer, iteration: int, value: float | None = None) -> None:
    value = iteration if value is None else value
    checkpointer.save(link(value, value), iteration)
    checkpointer.flush()


def any_contents(text: str) -> Contents:
    """What a file of a checkpoint holds, by its size and checksum."""
    return Contents(len(text), hashlib.sha256(text.encode()).hexdigest())
