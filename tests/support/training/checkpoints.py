"""Checkpoints: a trainer with state everywhere, a digest of it, links, and files."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import Chain, Link, report, training
from chainer.datasets import TupleDataset
from chainer.iterators import SerialIterator
from chainer.optimizers import Adam
from chainer.training import StandardUpdater, Trainer, extensions

from chainermn_train import create_multi_node_checkpointer, create_multi_node_optimizer
from chainermn_train.checkpoint.state_dict import state_dict


class Model(Chain):
    """Its loss draws from NumPy's generator and from Python's."""

    def __init__(self, inputs: int | None = None):
        super().__init__()
        with self.init_scope():
            self.hidden = L.Linear(inputs, 8)
            self.norm = L.BatchNormalization(8)
            self.out = L.Linear(8, 1)

    def forward(self, x, y):
        h = chainer.functions.dropout(self.norm(self.hidden(x)), 0.3)
        loss = chainer.functions.mean_squared_error(self.out(h), y) * (
            1 + random.random()
        )
        report({"loss": loss}, self)
        return loss


class Loop:
    """A target without a trainer."""

    def __init__(self, optimizer: Any) -> None:
        self.model = optimizer.target
        self.optimizer = optimizer

    def serialize(self, serializer: Any) -> None:
        self.model.serialize(serializer["model"])
        self.optimizer.serialize(serializer["optimizer"])


def shuffled(dataset):
    return SerialIterator(dataset, 4)


def noisy(seed: int) -> Model:
    """A model whose weights differ by the seed; its loss draws from two generators."""
    np.random.seed(seed)
    return Model(4)


def make_checkpointer(comm, path: Path | None = None, **options):
    return create_multi_node_checkpointer("run", comm, path=path, **options)


def make_trainer(
    comm, out, stop=8, seed=None, every=2, iterate=shuffled, **options
) -> tuple[Any, Model, Any]:
    """A trainer, its model, and its checkpointer, which saves `every` iterations; 0: never.

    It trains on this rank's examples, with state in every place that has one.
    """
    if seed is None:
        seed = comm.rank
    model = noisy(seed)
    random.seed(comm.rank)
    np.random.seed(comm.rank)
    x = np.random.uniform(size=(10, 4)).astype("f4")
    dataset = TupleDataset(x, x.sum(axis=1, keepdims=True))
    optimizer = create_multi_node_optimizer(Adam(), comm)
    updater = StandardUpdater(iterate(dataset), optimizer.setup(model))
    trainer = Trainer(updater, (stop, "iteration"), out=str(out))
    trainer.extend(extensions.ExponentialShift("alpha", 0.9), trigger=(2, "iteration"))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport(trigger=(4, "iteration")))
    checkpointer = make_checkpointer(comm, **options)
    if every:
        trainer.extend(checkpointer, trigger=(every, "iteration"))
    return trainer, model, checkpointer


def bits(model) -> dict[str, bytes]:
    return {name: param.array.tobytes() for name, param in model.namedparams()}


def files(comm, folder: Path) -> set[str]:
    """The checkpoint files there, seen by all ranks before any goes on (collective)."""
    comm.allgather_obj(None)
    found = {path.name for path in folder.iterdir()} - {"log", "run.lock"}
    comm.allgather_obj(None)
    return found


def contents(comm, folder: Path) -> dict[str, Any]:
    """All that is in a folder, by name, seen by all ranks before any goes on (collective)."""
    comm.allgather_obj(None)
    found = {
        path.name: (path.is_file() and path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.iterdir()
    }
    comm.allgather_obj(None)
    return found


def on_rank_0(comm, change: Callable[[], Any]):
    """Change files while no other rank does anything (collective)."""
    comm.allgather_obj(None)
    if comm.rank == 0:
        change()
    comm.allgather_obj(None)


def files_of(comm, *iterations) -> set[str]:
    return {f"run.{rank}.{each}" for rank in range(comm.size) for each in iterations}


def run_until(trainer, iteration: int, error: type[BaseException] = InterruptedError):
    """End training as a failing script does, after all other extensions."""

    @training.make_extension(priority=-1000)
    def stop(trainer):
        if trainer.updater.iteration == iteration:
            raise error("stopped by the test")

    trainer.extend(stop, name="stop")
    with pytest.raises(error):
        trainer.run(show_loop_exception_msg=False)


def link(*values: float) -> Link:
    made = Link()
    made.add_persistent("values", np.array(values, "f8"))
    made.add_persistent("nothing", None)
    made.add_persistent("text", "naïve")
    return made


def saved(comm, folder: Path, *iterations: int):
    """Save checkpoints whose link holds the number of the iteration and the rank."""
    checkpointer = make_checkpointer(comm, folder)
    for iteration in iterations:
        checkpointer.save(link(iteration, comm.rank), iteration)


def loaded(comm, folder: Path) -> list[float]:
    """The values of the link in the newest checkpoint; [0, 0] without one."""
    target = link(0, 0)
    make_checkpointer(comm, folder).maybe_load(target)
    return target.values.tolist()


def save_and_flush(checkpointer, iteration: int, value: float | None = None):
    if value is None:
        value = iteration
    else:
        value = value
    checkpointer.save(link(value, value), iteration)
    checkpointer.flush()


def digest(updater) -> str:
    """Of parameters, statistics, the optimizer's and the iterator's state, and generators."""
    state = {
        **state_dict(updater),
        "random": np.array([random.random(), np.random.uniform()]),
    }
    found = hashlib.sha256()
    for name, array in sorted(state.items()):
        title = f"{name} {array.dtype} {array.shape}"
        found.update(title.encode() + array.tobytes())
    return found.hexdigest()
