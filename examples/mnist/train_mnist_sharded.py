"""Trains copies of a perceptron on handwritten digits, each with shards of its layers on two ranks.

    mpiexec -n 4 python train_mnist_sharded.py

Ranks 0 and 1 hold one copy, each with a part of every matrix, ranks 2 and 3 another, and
so on. Each copy learns from its own share of the digits. Gradients are clipped by the norm
of the whole model. Ranks that hold the same shards (0, 2, ... and 1, 3, ...) divide the
steps of Adam and its state. Rank 0 leaves `log` in the folder `--out`, and ranks 0 and 1
their shards in `model_rank0.npz` and `model_rank1.npz`.
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
from chainermn.links import ColumnParallelLinear, RowParallelLinear
from train_mnist import load_digits


class MLP(chainer.Chain):
    def __init__(self, comm, n_units):
        super().__init__()
        with self.init_scope():
            self.l1 = ColumnParallelLinear(64, n_units, comm, gather_output=False)
            self.l2 = RowParallelLinear(n_units, 10, comm, input_is_parallel=True)

    def forward(self, x):
        return self.l2(F.relu(self.l1(x)))


def main():
    parser = argparse.ArgumentParser(
        description="ChainerMN example: copies, each with shards on two ranks"
    )
    parser.add_argument("--batchsize", "-b", type=int, default=100, help="of each copy")
    parser.add_argument("--epoch", "-e", type=int, default=20)
    parser.add_argument("--unit", "-u", type=int, default=300, help="of the layer")
    parser.add_argument(
        "--out", "-o", default="result", help="folder for what is written"
    )
    args = parser.parse_args()

    comm = chainermn.create_communicator()
    if comm.size % 2:
        raise ValueError(
            f"each copy lies on 2 ranks, and {comm.size} is odd: use mpiexec -n 4"
        )
    # The ranks of this copy of the model, and those that hold the same shards.
    model_comm = comm.split(comm.rank // 2, comm.rank)
    data_comm = comm.split(comm.rank % 2, comm.rank)

    # The same on all ranks: shards are then those of one model.
    np.random.seed(0)
    model = L.Classifier(MLP(model_comm, args.unit))
    adam = chainer.optimizers.Adam()
    optimizer = chainermn.create_multi_node_optimizer(adam, data_comm, sharded=True)
    optimizer.setup(model)
    optimizer.add_hook(chainermn.MultiNodeGradientClipping(1.0, model_comm))

    train, test = load_digits()
    if comm.rank == 0:
        print(
            f"{len(train)} digits to learn, {len(test)} to test; batch {args.batchsize}"
        )
        print(f"{data_comm.size} copies of the model, each on {model_comm.size} ranks")
    train = chainermn.scatter_dataset(train, data_comm, shuffle=True, seed=0)
    test = chainermn.scatter_dataset(test, data_comm, force_equal_length=False)
    # The ranks of a copy need the same examples.
    train_iter = chainermn.iterators.create_synchronized_iterator(
        chainer.iterators.SerialIterator(train, args.batchsize), model_comm
    )
    test_iter = chainer.iterators.SerialIterator(
        test, args.batchsize, repeat=False, shuffle=False
    )

    updater = training.StandardUpdater(train_iter, optimizer)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    evaluator = extensions.Evaluator(test_iter, model)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, data_comm))
    if comm.rank == 0:
        columns = ["main/loss", "main/accuracy", "validation/main/accuracy"]
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(["epoch", *columns, "elapsed_time"]))
    trainer.run()

    if data_comm.rank == 0:
        name = f"model_rank{comm.rank}.npz"
        chainer.serializers.save_npz(os.path.join(args.out, name), model)


if __name__ == "__main__":
    main()
