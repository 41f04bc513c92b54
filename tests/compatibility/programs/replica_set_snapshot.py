"""Snapshots of replica sets, loaded when the job is started again: rank 0 alone keeps a log."""

import json
import sys

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainer.training import extensions


def make_model(seed):
    np.random.seed(seed)
    return L.Classifier(L.Linear(2, 1), lossfun=F.mean_squared_error)


def make_optimizer():
    return chainer.optimizers.AdaGrad(lr=0.1)


def make_examples():
    inputs = np.random.RandomState(1).uniform(-1, 1, (24, 2)).astype(np.float32)
    return chainer.datasets.TupleDataset(inputs, inputs.sum(axis=1, keepdims=True))


def main(out):
    comm = chainermn.create_communicator("naive")
    model = make_model(seed=comm.rank)
    model.compute_accuracy = False
    optimizer = chainermn.create_multi_node_optimizer(make_optimizer(), comm)
    optimizer.setup(model)
    examples = make_examples() if comm.rank == 0 else None
    examples = chainermn.scatter_dataset(examples, comm)
    iterator = chainer.iterators.SerialIterator(examples, 2, shuffle=False)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    trainer = chainer.training.Trainer(updater, (7, "iteration"), out=out)
    snapshot = extensions.snapshot(autoload=True)
    snapshot = chainermn.extensions.multi_node_snapshot(comm, snapshot, [[0]])
    trainer.extend(snapshot, trigger=(2, "iteration"))
    log = extensions.LogReport(trigger=(1, "iteration"))
    if comm.rank == 0:
        trainer.extend(log)
    began = []

    @trainer.extend
    def note_iteration(trainer):
        began.append(trainer.updater.iteration)

    trainer.run()
    logged = [each["iteration"] for each in log.log]
    weights = [param.array.tolist() for param in model.params()]
    everyone = comm.gather_obj({"ran": began, "logged": logged, "weights": weights})
    if comm.rank == 0:
        print(json.dumps(everyone))


if __name__ == "__main__":
    main(sys.argv[1])
