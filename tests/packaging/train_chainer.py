"""Trains a small model with Chainer alone, takes snapshots and resumes, over every iterator.

Prints one JSON object: name of the iterator to validation accuracy. Not marked as a
test: it runs in an environment with Chainer (`python train_chainer.py`), spawns
processes and so needs to be a main module.
"""

import json
import multiprocessing
import os
import tempfile
import warnings

import chainer
import chainer.links as L
import numpy as np
from chainer import iterators, serializers, training
from chainer.training import extensions

EXAMPLES, BATCH = 64, 16


def dataset():
    """Points in the plane, labelled by the side of a line that they are on."""
    x = np.random.RandomState(0).uniform(-1, 1, (EXAMPLES, 2)).astype(np.float32)
    return chainer.datasets.TupleDataset(x, (x[:, 0] > x[:, 1]).astype(np.int32))


def make_iterator(name, data, **how):
    if name == "serial":
        return iterators.SerialIterator(data, BATCH, **how)
    if name == "multithread":
        return iterators.MultithreadIterator(data, BATCH, n_threads=2, **how)
    multiprocessing.set_start_method(name, force=True)
    return iterators.MultiprocessIterator(
        data, BATCH, n_processes=1, shared_mem=10_000, **how
    )


def make_trainer(name, out, epochs):
    np.random.seed(1)
    model = L.Classifier(L.Linear(2, 2))
    optimizer = chainer.optimizers.Adam(0.05).setup(model)
    data = dataset()
    iterator = make_iterator(name, data)
    updater = training.StandardUpdater(iterator, optimizer)
    trainer = training.Trainer(updater, (epochs, "epoch"), out=out)
    once = iterators.SerialIterator(data, BATCH, repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(once, model))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.snapshot(filename="snapshot"), trigger=(1, "epoch"))
    return trainer, iterator


def train_and_resume(name, out):
    """The last accuracy of four epochs and four more after a resume."""
    trainer, iterator = make_trainer(name, out, epochs=4)
    trainer.run()
    iterator.finalize()
    resumed, iterator = make_trainer(name, out, epochs=8)
    serializers.load_npz(os.path.join(out, "snapshot"), resumed)
    assert resumed.updater.iteration == 4 * EXAMPLES // BATCH
    resumed.run()
    iterator.finalize()
    with open(os.path.join(out, "log")) as file:
        log = json.load(file)
    assert [entry["epoch"] for entry in log] == list(range(1, 9))
    assert log[-1]["main/loss"] < log[0]["main/loss"]
    return log[-1]["validation/main/accuracy"]


def main():
    # Python 3.12's own.
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork")
    found = {}
    for name in ("serial", "multithread", "fork", "forkserver", "spawn"):
        with tempfile.TemporaryDirectory() as out:
            found[name] = train_and_resume(name, out)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
