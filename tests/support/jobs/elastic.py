"""A training of digits by any number of ranks, which kills one of them some time after it began.

    python elastic.py DIGITS OUT STOP BACKGROUND RANK SECONDS

Prints the iteration that it goes on from, which iterations are saved completely, and at
its end the parameters and the accuracy. RANK -1 kills none. The global batch is the
same for 1, 2, 3 and 4 ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import chainer
import chainer.links as L
import numpy as np
from chainer import Sequential, training, using_config
from chainer.datasets import TupleDataset
from chainer.iterators import SerialIterator
from chainer.optimizers import SGD
from chainer.training import StandardUpdater, Trainer

from chainermn_comm import create_communicator
from chainermn_train import (
    DistributedOrderSampler,
    create_multi_node_checkpointer,
    create_multi_node_optimizer,
)

GLOBAL_BATCH = 60
INTERVAL = 2
PAUSE = 0.01


def digits(folder: Path) -> Path:
    """A file of 1740 digits, whose number is divisible by all batches."""
    path = folder / "digits.npz"
    if not path.exists():
        from sklearn.datasets import load_digits  # which takes a second

        x, labels = load_digits(return_X_y=True)
        pixels = x[:1740] / 16
        np.savez(path, pixels, labels[:1740].astype("i4"))
    return path


def say(text: str):
    os.write(1, f"{text}\n".encode())  # in one piece, as ranks share the output


def main():
    file, out, stop, background, victim, seconds = sys.argv[1:]
    comm = create_communicator("flat")
    x, labels = np.load(file).values()
    data = TupleDataset(x, labels)
    with using_config("dtype", np.dtype("f8")):
        np.random.seed(0)
        layers = Sequential(L.Linear(64, 20), chainer.functions.tanh, L.Linear(20, 10))
        model = L.Classifier(layers)
    optimizer = create_multi_node_optimizer(SGD(0.5), comm).setup(model)
    sampler = DistributedOrderSampler(comm, 1)
    batch = GLOBAL_BATCH // comm.size
    iterator = SerialIterator(data, batch, order_sampler=sampler)
    updater = StandardUpdater(iterator, optimizer)
    trainer = Trainer(updater, (int(stop), "iteration"), out=out)
    is_background = background == "background"
    checkpointer = create_multi_node_checkpointer(
        "run", comm, 1, 1, background=is_background
    )
    trainer.extend(checkpointer, trigger=(INTERVAL, "iteration"))

    @training.make_extension(trigger=(1, "iteration"), priority=-250)
    def tell(trainer: Trainer):
        time.sleep(PAUSE)
        # What was saved before is complete when the next save has begun.
        last = (
            updater.iteration - updater.iteration % INTERVAL - INTERVAL * is_background
        )
        if comm.rank == 0 and last > 0:
            say(f"SAVED {last}")

    trainer.extend(tell)
    begin = checkpointer.maybe_load(trainer, optimizer)
    if comm.rank == 0:
        say(f"BEGIN {begin or 0}")
    if comm.rank == int(victim):
        arguments = [os.getpid(), signal.SIGKILL]
        kill = threading.Timer(float(seconds), os.kill, arguments)
        kill.daemon = True
        kill.start()
    trainer.run()
    if comm.rank == 0:
        with using_config("train", False):
            model(x, labels)
        weights = [
            param.array.ravel().tolist() for _, param in sorted(model.namedparams())
        ]
        flat = np.concatenate([np.ravel(each) for each in weights]).tolist()
        say(f"END {json.dumps([flat, float(model.accuracy.array)])}")


if __name__ == "__main__":
    main()
