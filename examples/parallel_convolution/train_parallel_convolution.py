"""Trains a convolutional network on handwritten digits, its channels split over the ranks.

    python train_parallel_convolution.py                one process, which has all channels
    mpiexec -n 2 python train_parallel_convolution.py   two ranks, each with half of them

Rank 0 has the images, the labels and the last layer. In each step all ranks get its
images; each convolves them into its own output channels. Between the two convolutions
every rank gets every rank's channels, after them only rank 0 does. Results are those of
one process, but for rounding. Rank 0 leaves `log` in the folder `--out`, and each rank
its part of the model.
"""

import argparse
import os

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import chainermn.functions as MF
import numpy as np
import sklearn.datasets
from chainer import training
from chainer.training import extensions


class ParallelConvNet(chainer.Chain):
    """This rank's channels of two convolutions, and on rank 0 the layer that judges them."""

    def __init__(self, comm, n_channels):
        super().__init__()
        self.comm = comm
        with self.init_scope():
            self.conv1 = part_of(L.Convolution2D(1, n_channels, ksize=3, pad=1), comm)
            self.conv2 = part_of(
                L.Convolution2D(n_channels, 2 * n_channels, ksize=3, pad=1), comm
            )
            if comm.rank == 0:
                self.last = L.Linear(None, 10)

    def forward(self, x=None):
        """On rank 0, scores of shape (N, 10) for images of shape (N, 1, 8, 8).

        Elsewhere x is not given, and the result is only there to call `backward`.
        """
        x = MF.bcast(self.comm, x)
        h = F.relu(self.conv1(x))
        h = F.concat(MF.allgather(self.comm, h), axis=1)
        h = F.max_pooling_2d(F.relu(self.conv2(h)), ksize=2)
        parts = MF.gather(self.comm, h)
        return self.last(F.concat(parts, axis=1)) if self.comm.rank == 0 else parts


def part_of(whole, comm):
    """This rank's output channels of a convolution, which all ranks have drawn alike."""
    mine = np.array_split(np.arange(whole.out_channels), comm.size)[comm.rank]
    return L.Convolution2D(
        whole.W.shape[1],
        len(mine),
        ksize=whole.ksize,
        pad=whole.pad,
        initialW=whole.W.array[mine],
        initial_bias=whole.b.array[mine],
    )


def load_digits():
    """The digits of scikit-learn, images of shape (1, 8, 8): 1,440 to learn and 357 to test."""
    x, t = sklearn.datasets.load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    digits = chainer.datasets.TupleDataset(x, t.astype(np.int32))
    return chainer.datasets.split_dataset_random(digits, 1440, seed=0)


def main():
    parser = argparse.ArgumentParser(
        description="ChainerMN example: channels split over ranks"
    )
    parser.add_argument("--communicator", default="hierarchical")
    parser.add_argument(
        "--gpu", action="store_true", help="a GPU for each rank of a node"
    )
    parser.add_argument("--batchsize", "-b", type=int, default=100)
    parser.add_argument(
        "--channels", "-c", type=int, default=16, help="of the first convolution"
    )
    parser.add_argument("--epoch", "-e", type=int, default=20)
    parser.add_argument(
        "--out", "-o", default="result", help="folder for what is written"
    )
    args = parser.parse_args()

    comm = chainermn.create_communicator(args.communicator)
    if comm.size > args.channels:
        raise ValueError(
            f"{comm.size} ranks are too many for --channels {args.channels}"
        )
    device = -1
    if args.gpu:
        device = comm.intra_rank
        chainer.cuda.get_device_from_id(device).use()

    np.random.seed(0)  # alike on all ranks, which draw the same weights
    train, test = load_digits()
    if comm.rank == 0:
        print(
            f"{len(train)} digits to learn, {len(test)} to test; channels on {comm.size} ranks"
        )
    else:  # they keep step with rank 0, and get the images from there
        train, test = map(chainermn.create_empty_dataset, (train, test))
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(
        test, args.batchsize, repeat=False, shuffle=False
    )

    network = ParallelConvNet(comm, args.channels)
    model = L.Classifier(network) if comm.rank == 0 else network
    if args.gpu:
        model.to_gpu()
    # No multi-node one: no two ranks have the same channels.
    optimizer = chainer.optimizers.Adam()
    optimizer.setup(model)

    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    # On all ranks, too.
    trainer.extend(extensions.Evaluator(test_iter, model, device=device))
    if comm.rank == 0:
        columns = [
            "main/loss",
            "validation/main/loss",
            "main/accuracy",
            "validation/main/accuracy",
        ]
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(["epoch", *columns, "elapsed_time"]))
    trainer.run()

    name = f"model_rank{comm.rank}of{comm.size}.npz"
    chainer.serializers.save_npz(os.path.join(args.out, name), network)


if __name__ == "__main__":
    main()
