"""Trains a perceptron on handwritten digits whose layers lie on two ranks.

    mpiexec -n 2 python train_mnist_model_parallel.py

Rank 0 has the images, the labels, the first layer and the last; rank 1 has the layer between
them. In each step activations go from rank 0 to rank 1 and back, and their gradients the other
way round. Each rank's optimizer updates the layers that are there. Rank 0 leaves `log` in the
folder `--out`, and each rank its layers in `model_rank0.npz` and `model_rank1.npz`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions
from mistakes import create_communicator, program, stop_all, stop_if, too_large
from mpi4py import MPI
from options import BATCHSIZE, options, parse
from train_mnist import SEED, load, print_results

RANKS = 2  # of one copy of the model
PIXELS = {"mnist": 784, "digits": 64}


class First(chainer.Chain):
    """The layer that sees the images."""

    def __init__(self, n_in: int, n_units: int) -> None:
        super().__init__()
        with self.init_scope():
            # Not of a size left open: averaged over copies of the model, the first gradient of a
            # layer that is not initialised before it would be lost.
            self.l1 = L.Linear(n_in, n_units)

    def forward(self, x: Any) -> Any:
        return F.relu(self.l1(x))


class Middle(chainer.Chain):
    """The layer that sees what the first one returned."""

    def __init__(self, n_units: int) -> None:
        super().__init__()
        with self.init_scope():
            self.l2 = L.Linear(n_units, n_units)

    def forward(self, h: Any) -> Any:
        return F.relu(self.l2(h))


class Last(chainer.Chain):
    """The layer that gives a score to each class."""

    def __init__(self, n_units: int, n_out: int) -> None:
        super().__init__()
        with self.init_scope():
            self.l3 = L.Linear(n_units, n_out)

    def forward(self, h: Any) -> Any:
        return self.l3(h)


def create_model(comm: Any, n_in: int, n_units: int, n_out: int) -> chainer.Link:
    """This rank's part of the model; called, it takes part in computing the loss.

    Rank 0 is called with images and labels, rank 1 with nothing.
    """
    parts = chainermn.MultiNodeChainList(comm)
    if comm.rank == 0:
        parts.add_link(First(n_in, n_units), rank_in=None, rank_out=1)
        parts.add_link(Last(n_units, n_out), rank_in=1, rank_out=None)
        return L.Classifier(parts)
    parts.add_link(Middle(n_units), rank_in=0, rank_out=0)
    return parts


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(options("ChainerMN example: a model whose layers lie on two ranks"), argv)
    if MPI.COMM_WORLD.size != RANKS:
        refuse_ranks(f"the model lies on {RANKS} ranks")
    comm = create_communicator(args)

    device = -1
    if args.gpu:
        device = comm.intra_rank
        chainer.cuda.get_device_from_id(device).use()

    train, test = load(args.dataset, comm)
    n_train, n_test = comm.bcast_obj((len(train), len(test)) if comm.rank == 0 else None)
    args.batchsize = args.batchsize or min(BATCHSIZE, n_train)
    stop_if(comm, too_large(args.batchsize, n_train))
    if comm.rank > 0:  # it is in step with rank 0, but has no use for the examples
        train = chainermn.create_empty_dataset(range(n_train))
        test = chainermn.create_empty_dataset(range(n_test))
    else:
        print(
            f"communicator {args.communicator}, layers on {comm.size} ranks; {args.dataset}: "
            f"{n_train} training and {n_test} test examples; batch {args.batchsize}",
            flush=True,
        )
    np.random.seed(SEED + comm.rank)  # layers start differently
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(test, args.batchsize, repeat=False, shuffle=False)

    model = create_model(comm, PIXELS[args.dataset], args.unit, 10)
    if args.gpu:
        model.to_gpu()
    optimizer = chainer.optimizers.Adam()  # no multi-node one: no two ranks have the same layer
    optimizer.setup(model)

    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    trainer.extend(extensions.Evaluator(test_iter, model, device=device))  # on both ranks, too
    if comm.rank == 0:
        report(trainer)
    trainer.run()

    chainer.serializers.save_npz(os.path.join(args.out, f"model_rank{comm.rank}.npz"), model)
    if comm.rank == 0:
        print_results(trainer, "model_rank0.npz and model_rank1.npz")


def refuse_ranks(why: str) -> None:
    """End the job, whose number of ranks doesn't serve; before there is a communicator."""
    stop_all(f"{why}, not {MPI.COMM_WORLD.size}; run mpiexec -n N python {program()}")


def report(trainer: Any) -> None:
    """Add the log and the table, on the one rank that has the loss."""
    trainer.extend(extensions.LogReport())
    curves = ["main/loss", "validation/main/loss", "main/accuracy", "validation/main/accuracy"]
    trainer.extend(extensions.PrintReport(["epoch", *curves, "elapsed_time"]))


if __name__ == "__main__":
    main()
