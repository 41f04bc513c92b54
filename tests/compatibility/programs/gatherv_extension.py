"""An extension that brings all ranks' predictions together with MPI's own Gatherv."""

import json

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np


def gather_predictions(model, examples, comm, collected):
    @chainer.training.make_extension(trigger=(1, "epoch"))
    def extension(trainer):
        with chainer.no_backprop_mode():
            own = model(np.asarray(examples[:])).array.ravel()
        counts = comm.mpi_comm.gather(own.size)
        everything = None
        target = None
        if comm.rank == 0:
            everything = np.empty(sum(counts), np.float32)
            target = [everything, counts]
        comm.mpi_comm.Gatherv(own, target, root=0)
        if comm.rank == 0:
            collected.append(everything.tolist())

    return extension


def make_model():
    return L.Linear(2, 1, initialW=np.array([[1, -2]], np.float32), initial_bias=3)


def make_examples():
    return np.arange(22, dtype=np.float32).reshape(11, 2) ** 2


def main():
    comm = chainermn.create_communicator("single_node")
    model = make_model()
    optimizer = chainer.optimizers.SGD(lr=0)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm).setup(model)
    examples = make_examples() if comm.rank == 0 else None
    examples = chainermn.scatter_dataset(examples, comm, force_equal_length=False)
    iterator = chainer.iterators.SerialIterator(examples, 2, shuffle=False)
    updater = chainer.training.StandardUpdater(
        iterator, optimizer, loss_func=lambda batch: F.mean(model(batch))
    )
    trainer = chainer.training.Trainer(updater, (6, "iteration"))
    collected = []
    extension = gather_predictions(model, examples, comm, collected)
    trainer.extend(extension, trigger=(3, "iteration"))
    trainer.run()
    if comm.rank == 0:
        print(json.dumps(collected))


if __name__ == "__main__":
    main()
