"""Trains a convolutional network on handwritten digits, its channels split over the ranks.

    python train_parallel_convolution.py                one process, which has all channels
    mpiexec -n 2 python train_parallel_convolution.py   two ranks, each with half of them

Rank 0 has the images, the labels and the last layer. In each step all ranks get its images;
each convolves them into its own output channels. Between the two convolutions every rank gets
every rank's channels, after them only rank 0 does. Results are those of one process, but for
rounding. Rank 0 leaves `log` in the folder `--out`, and each rank its part of the model.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import chainermn.functions as MF
import numpy as np
from chainer import training
from chainer.training import extensions
from mpi4py import MPI

# What the examples have in common: how the command line is read, and mistakes are told.
sys.path.append(str(Path(__file__).resolve().parents[1] / "mnist"))
from mistakes import create_communicator, stop_all, too_large
from options import BATCHSIZE, common_options, parse, positive

SEED = 0  # of the split and the first weights: a run can be repeated
DIGITS_FOR_TRAINING = 1440  # of 1,797


class ParallelConvNet(chainer.Chain):
    """This rank's channels of two convolutions, and on rank 0 the layer that judges them."""

    def __init__(self, comm: Any, n_channels: int, n_out: int) -> None:
        super().__init__()
        self.comm = comm
        with self.init_scope():
            self.conv1 = part_of(L.Convolution2D(1, n_channels, ksize=3, pad=1), comm)
            self.conv2 = part_of(L.Convolution2D(n_channels, 2 * n_channels, ksize=3, pad=1), comm)
            if comm.rank == 0:
                self.last = L.Linear(None, n_out)

    def forward(self, x: Any = None) -> Any:
        """On rank 0, scores of shape (N, n_out) for images of shape (N, 1, height, width).

        Elsewhere x is not given, and the result is only there to call `backward`.
        """
        x = MF.bcast(self.comm, x)
        h = F.relu(self.conv1(x))
        h = F.concat(MF.allgather(self.comm, h), axis=1)
        h = F.max_pooling_2d(F.relu(self.conv2(h)), ksize=2)
        parts = MF.gather(self.comm, h)
        return self.last(F.concat(parts, axis=1)) if self.comm.rank == 0 else parts


def part_of(whole: Any, comm: Any) -> Any:
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


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    if MPI.COMM_WORLD.size > args.channels:
        stop_all(f"{MPI.COMM_WORLD.size} ranks are too many for --channels {args.channels}")
    comm = create_communicator(args)

    device = -1
    if args.gpu:
        device = comm.intra_rank
        chainer.cuda.get_device_from_id(device).use()

    train, test = load_digits()
    if comm.rank == 0:
        print(
            f"communicator {args.communicator}, channels on {comm.size} ranks; "
            f"{len(train)} training and {len(test)} test examples; batch {args.batchsize}",
            flush=True,
        )
    else:  # they are in step with rank 0, and get the images from there
        train, test = chainermn.create_empty_dataset(train), chainermn.create_empty_dataset(test)
    np.random.seed(SEED)  # alike on all ranks, which draw the same
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(test, args.batchsize, repeat=False, shuffle=False)

    network = ParallelConvNet(comm, args.channels, 10)
    model = L.Classifier(network) if comm.rank == 0 else network
    if args.gpu:
        model.to_gpu()
    optimizer = chainer.optimizers.Adam()  # no multi-node one: no two ranks have the same channels
    optimizer.setup(model)

    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    trainer.extend(extensions.Evaluator(test_iter, model, device=device))  # on all ranks, too
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        curves = ["main/loss", "validation/main/loss", "main/accuracy", "validation/main/accuracy"]
        trainer.extend(extensions.PrintReport(["epoch", *curves, "elapsed_time"]))
    trainer.run()

    name = f"model_rank{comm.rank}of{comm.size}.npz"
    chainer.serializers.save_npz(os.path.join(args.out, name), network)
    if comm.rank == 0:
        last = trainer.get_extension("LogReport").log[-1]
        print(
            f"validation accuracy {last['validation/main/accuracy']:.4f} after {last['epoch']} "
            f"epochs and {last['elapsed_time']:.1f} s; log and {name} are in {trainer.out}",
            flush=True,
        )


def load_digits() -> tuple[Any, Any]:
    """The digits that come with scikit-learn: images (1, 8, 8), float32 in 0..1, and labels."""
    import sklearn.datasets

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.RandomState(SEED).permutation(len(images))
    x = (images[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    y = labels[order].astype(np.int32)
    cut = DIGITS_FOR_TRAINING
    return (
        chainer.datasets.TupleDataset(x[:cut], y[:cut]),
        chainer.datasets.TupleDataset(x[cut:], y[cut:]),
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = common_options("ChainerMN example: channels split over ranks", epochs=20)
    add = parser.add_argument
    add("--batchsize", "-b", type=positive, default=BATCHSIZE, help="default: %(default)s")
    add(
        "--channels",
        "-c",
        type=positive,
        default=16,
        help="of the first layer (default: %(default)s)",
    )
    args = parse(parser, argv)
    if problem := too_large(args.batchsize, DIGITS_FOR_TRAINING):
        stop_all(problem)
    return args


if __name__ == "__main__":
    main()
