"""Trains copies of a perceptron on handwritten digits, each with its layers on two ranks.

    mpiexec -n 4 python train_mnist_dual_parallel.py

Data parallel and model parallel at once. Ranks 0 and 1 hold one copy of the model (that
of train_mnist_model_parallel.py), ranks 2 and 3 another, and so on. Each copy learns
from its own share of the digits; ranks that hold the same layers (0, 2, ... and 1, 3,
...) apply the mean of their gradients. Rank 0 leaves `log` in the folder `--out`, and
ranks 0 and 1 their layers in `model_rank0.npz` and `model_rank1.npz`.
"""

import argparse
import os

import chainer
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions
from train_mnist import load_digits
from train_mnist_model_parallel import create_model


def main():
    parser = argparse.ArgumentParser(
        description="ChainerMN example: copies, each on two ranks"
    )
    parser.add_argument("--communicator", default="hierarchical")
    parser.add_argument(
        "--gpu", action="store_true", help="a GPU for each rank of a node"
    )
    parser.add_argument("--batchsize", "-b", type=int, default=100, help="of each copy")
    parser.add_argument("--epoch", "-e", type=int, default=20)
    parser.add_argument("--unit", "-u", type=int, default=300, help="of each layer")
    parser.add_argument(
        "--out", "-o", default="result", help="folder for what is written"
    )
    args = parser.parse_args()

    comm = chainermn.create_communicator(args.communicator)
    if comm.size % 2:
        raise ValueError(
            f"each copy lies on 2 ranks, and {comm.size} is odd: use mpiexec -n 4"
        )
    # The ranks of this copy of the model, and those that hold the same layers of other
    # copies.
    model_comm = comm.split(comm.rank // 2, comm.rank)
    data_comm = comm.split(comm.rank % 2, comm.rank)
    device = -1
    if args.gpu:
        device = comm.intra_rank
        chainer.cuda.get_device_from_id(device).use()

    # A run can be repeated; optimizers give rank 0's and 1's layers.
    np.random.seed(comm.rank)
    train, test = load_digits()
    if comm.rank == 0:
        print(
            f"{len(train)} digits to learn, {len(test)} to test; batch {args.batchsize} a copy"
        )
        print(f"{data_comm.size} copies of the model, each on {model_comm.size} ranks")
    train = chainermn.scatter_dataset(train, data_comm, shuffle=True, seed=0)
    test = chainermn.scatter_dataset(test, data_comm, force_equal_length=False)
    # It keeps step with the first, but has no use for the digits.
    if model_comm.rank == 1:
        train, test = map(chainermn.create_empty_dataset, (train, test))
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(
        test, args.batchsize, repeat=False, shuffle=False
    )

    model = create_model(model_comm, args.unit)
    if args.gpu:
        model.to_gpu()
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(), data_comm
    )
    optimizer.setup(model)

    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    evaluator = extensions.Evaluator(test_iter, model, device=device)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, data_comm))
    if comm.rank == 0:  # it has the loss, and reports for all
        columns = [
            "main/loss",
            "validation/main/loss",
            "main/accuracy",
            "validation/main/accuracy",
        ]
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(["epoch", *columns, "elapsed_time"]))
    trainer.run()

    if data_comm.rank == 0:
        chainer.serializers.save_npz(
            os.path.join(args.out, f"model_rank{comm.rank}.npz"), model
        )


if __name__ == "__main__":
    main()
