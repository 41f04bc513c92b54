"""A training job that goes on from its checkpoints, and kills itself where it is told to.

    python killed.py OPTIONS

OPTIONS: {"out": FOLDER, "stop": 12, "communicator": "flat", "background": false,
"again": false,
          "kill": KILL or null}.

With "again": true, each iteration that is saved is saved a second time. A KILL has a
"rank", and by "at" the function below that prepares it, and its arguments. Prints the
iteration that the job goes on from, and at its end a digest of all that was trained.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import random
import signal
import sys
import threading

import chainer
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions

from chainermn_comm import create_communicator
from chainermn_train import (
    MultiNodeCheckpointer,
    create_multi_node_checkpointer,
    create_multi_node_optimizer,
)
from chainermn_train.checkpoint.state_dict import state_dict

INTERVAL = 3  # iterations between saves


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(owner, name, now, after=False):
    """Replace a function by one that kills this process when `now(*arguments)`."""
    real = getattr(owner, name)

    def function(*arguments, **options):
        fatal = now(*arguments)
        if fatal and not after:
            die()
        result = real(*arguments, **options)
        if fatal:
            die()
        return result

    setattr(owner, name, function)


def at_save(updater, iteration):
    """As a save begins."""
    kill_at(MultiNodeCheckpointer, "save", lambda *_: updater.iteration == iteration)


def at_write(updater, iteration, arrays=10):
    """When some arrays of a file have been written, of more."""
    written = []

    def now(*_):
        written.append(updater.iteration)
        return written.count(iteration) > arrays

    kill_at(np.lib.format, "write_array", now)


def at_sync(updater, iteration):
    """When a whole file has been written, and nothing done to keep it."""
    kill_at(os, "fsync", lambda _: updater.iteration == iteration)


def at_replace(updater, path, after=False, time=1):
    """Before a file gets its name, or after; the first time or a later one."""
    names = []

    def now(_, target):
        names.append(target.name)
        return target.name == path and names.count(path) == time

    kill_at(os, "replace", now, after)


def at_unlink(updater, path, after=False):
    """Before a file is removed, or after."""
    kill_at(pathlib.Path, "unlink", lambda file, **_: file.name == path, after)


def at_step(updater, iteration):
    """When the loss of a step has been computed."""
    kill_at(Model, "forward", lambda *_: updater.iteration == iteration - 1, after=True)


def at_mean(updater, iteration):
    """When other ranks wait in the mean of a step's gradients."""
    owner = type(updater.get_optimizer("main").communicator)
    kill_at(owner, "make_reducer", lambda *_: updater.iteration == iteration - 1)


def at_moment(updater, iteration, seconds):
    """So long after a step began, whatever goes on then."""
    real = Model.forward

    def forward(self, x, y):
        if updater.iteration == iteration - 1:
            threading.Timer(seconds, die).start()
        return real(self, x, y)

    Model.forward = forward


class Model(chainer.Chain):
    """Its loss draws from NumPy's generator and from Python's."""

    def __init__(self, inputs: int | None = None) -> None:
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
        chainer.report({"loss": loss}, self)
        return loss


def shuffled(dataset):
    return chainer.iterators.SerialIterator(dataset, 4)


def make_trainer(comm, out, stop, model=None, iterate=shuffled):
    """A trainer of this rank's examples, with state in every place that has one."""
    random.seed(comm.rank)
    np.random.seed(comm.rank)
    x = np.random.uniform(size=(10, 4)).astype("f4")
    dataset = chainer.datasets.TupleDataset(x, x.sum(axis=1, keepdims=True))
    optimizer = create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
    updater = training.StandardUpdater(
        iterate(dataset), optimizer.setup(model or Model())
    )
    trainer = training.Trainer(updater, (stop, "iteration"), out=str(out))
    trainer.extend(extensions.ExponentialShift("alpha", 0.9), trigger=(2, "iteration"))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport(trigger=(4, "iteration")))
    return trainer


def digest(updater) -> str:
    """Of parameters, statistics, the optimizer's and the iterator's state, and generators."""
    state = {
        **state_dict(updater),
        "random": np.array([random.random(), np.random.uniform()]),
    }
    found = hashlib.sha256()
    for name, array in sorted(state.items()):
        found.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def main() -> None:
    options = json.loads(sys.argv[1])
    comm = create_communicator(options["communicator"])
    trainer = make_trainer(comm, options["out"], options["stop"])
    background = options["background"]
    checkpointer = create_multi_node_checkpointer(
        "run", comm, 1, 1, background=background
    )
    trainer.extend(checkpointer, trigger=(INTERVAL, "iteration"))
    if options["again"]:
        save_again = training.make_extension(priority=-201)(
            lambda trainer: checkpointer.save(trainer, trainer.updater.iteration)
        )
        trainer.extend(save_again, "again", trigger=(INTERVAL, "iteration"))
    begin = checkpointer.maybe_load(trainer)
    if comm.rank == 0:
        print(f"BEGIN {begin or 0}\n", end="", flush=True)
    kill = options["kill"]
    if kill is not None and kill.pop("rank") == comm.rank:
        globals()[f"at_{kill.pop('at')}"](trainer.updater, **kill)
    trainer.run()
    # In one piece, since the ranks share the output.
    print(f"END {comm.rank} {digest(trainer.updater)}\n", end="", flush=True)


if __name__ == "__main__":
    main()
