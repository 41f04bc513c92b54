"""Trains a perceptron on handwritten digits whose layers lie on two ranks.

    mpiexec -n 2 python train_mnist_model_parallel.py

Rank 0 has the images, the labels, the first layer and the last; rank 1 has the layer
between them. In each step activations go from rank 0 to rank 1 and back, and their
gradients the other way round. Rank 0 leaves `log` in the folder `--out`, and each rank
its layers in `model_rank0.npz` and `model_rank1.npz`.
"""

import argparse
import os

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions
from train_mnist import load_digits


class Hidden(chainer.Chain):
    def __init__(self, n_in, n_units):
        super().__init__()
        with self.init_scope():
            self.linear = L.Linear(n_in, n_units)

    def forward(self, x):
        return F.relu(self.linear(x))


def create_model(comm, n_units):
    """Return this rank's part: rank 0 calls it with images and labels, rank 1 with nothing."""
    parts = chainermn.MultiNodeChainList(comm)
    if comm.rank == 0:
        parts.add_link(Hidden(64, n_units), rank_in=None, rank_out=1)
        parts.add_link(L.Linear(n_units, 10), rank_in=1, rank_out=None)
        return L.Classifier(parts)
    parts.add_link(Hidden(n_units, n_units), rank_in=0, rank_out=0)
    return parts


def main():
    parser = argparse.ArgumentParser(
        description="ChainerMN example: layers on two ranks"
    )
    parser.add_argument("--communicator", default="hierarchical")
    parser.add_argument(
        "--gpu", action="store_true", help="a GPU for each rank of a node"
    )
    parser.add_argument("--batchsize", "-b", type=int, default=100)
    parser.add_argument("--epoch", "-e", type=int, default=20)
    parser.add_argument("--unit", "-u", type=int, default=300, help="of each layer")
    parser.add_argument(
        "--out", "-o", default="result", help="folder for what is written"
    )
    args = parser.parse_args()

    comm = chainermn.create_communicator(args.communicator)
    if comm.size != 2:
        raise ValueError(
            f"the model lies on 2 ranks, not on {comm.size}: use mpiexec -n 2"
        )
    device = -1
    if args.gpu:
        device = comm.intra_rank
        chainer.cuda.get_device_from_id(device).use()

    np.random.seed(comm.rank)  # a run can be repeated, and its layers differ
    train, test = load_digits()
    if comm.rank == 0:
        print(
            f"{len(train)} digits to learn, {len(test)} to test; batch {args.batchsize}"
        )
    else:  # it keeps step with rank 0, but has no use for the digits
        train, test = map(chainermn.create_empty_dataset, (train, test))
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(
        test, args.batchsize, repeat=False, shuffle=False
    )

    model = create_model(comm, args.unit)
    if args.gpu:
        model.to_gpu()
    # No multi-node one: no two ranks have the same layer.
    optimizer = chainer.optimizers.Adam()
    optimizer.setup(model)

    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    # On both ranks, too.
    trainer.extend(extensions.Evaluator(test_iter, model, device=device))
    if comm.rank == 0:  # the rank that has the loss
        columns = [
            "main/loss",
            "validation/main/loss",
            "main/accuracy",
            "validation/main/accuracy",
        ]
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(["epoch", *columns, "elapsed_time"]))
    trainer.run()

    chainer.serializers.save_npz(
        os.path.join(args.out, f"model_rank{comm.rank}.npz"), model
    )


if __name__ == "__main__":
    main()
