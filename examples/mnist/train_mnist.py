"""Trains a perceptron on handwritten digits, on any number of ranks.

    python train_mnist.py                       one process
    mpiexec -n 2 python train_mnist.py          two ranks on this machine
    mpiexec -n 8 python train_mnist.py --gpu    a GPU for each rank

Rank 0 leaves `log`, `model.npz` and `curves.png` in the folder `--out`. A job that was
killed goes on with `--resume`.
"""

import argparse
import os
from pathlib import Path

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions
from curves import draw
from plain_output import PlainOutput


class MLP(chainer.Chain):
    def __init__(self, n_units):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(None, n_units)
            self.l2 = L.Linear(n_units, n_units)
            self.l3 = L.Linear(n_units, 10)

    def forward(self, x):
        return self.l3(F.relu(self.l2(F.relu(self.l1(x)))))


def load_digits():
    """Digits of 8 x 8 pixels, from 0 to 16: 1,440 to learn and 357 to test."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        x, t = (file["x"] / 16).astype(np.float32), file["t"].astype(np.int32)
    digits = chainer.datasets.TupleDataset(x, t)
    return chainer.datasets.split_dataset_random(digits, 1440, seed=0)


def main():
    parser = argparse.ArgumentParser(
        description="ChainerMN example: handwritten digits"
    )
    parser.add_argument("--communicator", default="hierarchical")
    parser.add_argument(
        "--gpu", action="store_true", help="a GPU for each rank of a node"
    )
    parser.add_argument("--batchsize", "-b", type=int, default=100, help="of each rank")
    parser.add_argument("--epoch", "-e", type=int, default=20)
    parser.add_argument("--unit", "-u", type=int, default=300, help="of each layer")
    parser.add_argument(
        "--out", "-o", default="result", help="folder for what is written"
    )
    parser.add_argument(
        "--resume", "-r", action="store_true", help="go on with a killed job"
    )
    args = parser.parse_args()

    comm = chainermn.create_communicator(args.communicator)
    device = comm.intra_rank if args.gpu else -1
    if args.gpu:
        chainer.cuda.get_device_from_id(device).use()

    np.random.seed(0)  # a run can be repeated
    # Rank 0 reads the data; each rank gets its share.
    train, test = load_digits() if comm.rank == 0 else (None, None)
    if comm.rank == 0:
        print(
            f"{len(train)} digits to learn, {len(test)} to test; batch {args.batchsize} a rank"
        )
        print(
            f"communicator {args.communicator}, ranks {comm.size}, nodes {comm.inter_size}"
        )
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=0)
    # None counts twice.
    test = chainermn.scatter_dataset(test, comm, force_equal_length=False)
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(
        test, args.batchsize, repeat=False, shuffle=False
    )

    model = L.Classifier(MLP(args.unit))
    if args.gpu:
        model.to_gpu()
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
    optimizer.setup(model)

    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    evaluator = extensions.Evaluator(test_iter, model, device=device)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))
    if comm.rank == 0:  # one rank reports for all
        columns = [
            "main/loss",
            "validation/main/loss",
            "main/accuracy",
            "validation/main/accuracy",
        ]
        trainer.extend(extensions.LogReport())
        columns = ["epoch", *columns, "elapsed_time"]
        trainer.extend(extensions.PrintReport(columns, out=PlainOutput()))
    checkpointer = chainermn.create_multi_node_checkpointer("mnist", comm)
    trainer.extend(checkpointer, trigger=(1, "epoch"))
    if args.resume:
        checkpointer.maybe_load(trainer, optimizer)
    trainer.run()

    if comm.rank == 0:
        chainer.serializers.save_npz(os.path.join(args.out, "model.npz"), model)
        log = trainer.get_extension("LogReport").log
        draw(log, os.path.join(args.out, "curves.png"), comm.size)
        if log:  # `--epoch -1` trains nothing
            accuracy = log[-1]["validation/main/accuracy"]
            print(f"validation accuracy {accuracy:.4f}; see {args.out}/curves.png")


if __name__ == "__main__":
    main()
