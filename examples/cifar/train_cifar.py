"""Trains a convolutional network to tell where a patch of a photograph comes from.

    mpiexec -n 2 python train_cifar.py           running means are averaged over the ranks
    mpiexec -n 2 python train_cifar.py --mnbn    batches are normalized over all ranks

scikit-learn's two photographs serve as a small CIFAR-10: 16 x 16 pixels in colour, ten
classes. Rank 0 leaves `log` and `model.npz` in the folder `--out`.
"""

import argparse
import os

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
import sklearn.datasets
from chainer import training
from chainer.training import extensions

SIDE = 16  # pixels of a patch
BANDS = 5  # of each photograph, from its top to its bottom


class Block(chainer.Chain):
    """A convolution, normalized; half as wide and high as what comes in."""

    def __init__(self, n_channels):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(None, n_channels, ksize=3, pad=1, nobias=True)
            self.bn = L.BatchNormalization(n_channels)

    def forward(self, x):
        return F.max_pooling_2d(F.relu(self.bn(self.conv(x))), 2)


class SmallVGG(chainer.Chain):
    def __init__(self, n_classes):
        super().__init__()
        with self.init_scope():
            self.block1 = Block(16)
            self.block2 = Block(32)
            self.block3 = Block(64)
            self.fc = L.Linear(None, n_classes)

    def forward(self, x):
        h = self.block3(self.block2(self.block1(x)))
        return self.fc(F.dropout(h, 0.2))


def load_patches():
    """All patches that don't overlap: 1,600 to learn and 400 to test, 200 of each class.

    A patch is float32 of shape (3, 16, 16) in -1..1; its class says which photograph it
    is of, and which band of it.
    """
    rows, columns = 25, 40  # of patches in a photograph, which has 427 x 640 pixels
    patches = []
    for photograph in sklearn.datasets.load_sample_images().images:
        x = photograph[: rows * SIDE, : columns * SIDE].astype(np.float32) / 127.5 - 1
        x = x.reshape(rows, SIDE, columns, SIDE, 3).transpose(0, 2, 4, 1, 3)
        patches.append(x.reshape(rows * columns, 3, SIDE, SIDE))
    x = np.concatenate(patches)
    t = np.arange(len(x), dtype=np.int32) * 2 * BANDS // len(x)
    data = chainer.datasets.TupleDataset(x, t.astype(np.int32))
    return chainer.datasets.split_dataset_random(data, 1600, seed=0)


def main():
    parser = argparse.ArgumentParser(
        description="ChainerMN example: patches of photographs"
    )
    parser.add_argument("--communicator", default="hierarchical")
    parser.add_argument(
        "--gpu", action="store_true", help="a GPU for each rank of a node"
    )
    parser.add_argument("--batchsize", "-b", type=int, default=32, help="of each rank")
    parser.add_argument("--epoch", "-e", type=int, default=20)
    parser.add_argument("--learnrate", "-l", type=float, default=0.05)
    parser.add_argument(
        "--mnbn", action="store_true", help="normalize over all ranks' batches"
    )
    parser.add_argument(
        "--out", "-o", default="result", help="folder for what is written"
    )
    args = parser.parse_args()

    comm = chainermn.create_communicator(args.communicator)
    device = -1
    if args.gpu:
        device = comm.intra_rank
        chainer.cuda.get_device_from_id(device).use()

    np.random.seed(comm.rank)  # a run can be repeated; dropout differs between ranks
    train, test = load_patches() if comm.rank == 0 else (None, None)
    if comm.rank == 0:
        print(
            f"{len(train)} patches to learn, {len(test)} to test; ranks {comm.size}",
            flush=True,
        )
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=0)
    test = chainermn.scatter_dataset(test, comm, force_equal_length=False)
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(
        test, args.batchsize, repeat=False, shuffle=False
    )

    model = L.Classifier(SmallVGG(2 * BANDS))
    if args.mnbn:
        model = chainermn.links.create_mnbn_model(model, comm)
    if args.gpu:
        model.to_gpu()
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(args.learnrate), comm
    )
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(5e-4))

    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    # On every rank: each changes the learning rate of its own optimizer.
    trainer.extend(extensions.ExponentialShift("lr", 0.5), trigger=(5, "epoch"))
    # Each rank has running means of what it saw: average them, then evaluate.
    if not args.mnbn:
        trainer.extend(chainermn.extensions.AllreducePersistent(model, comm))
    evaluator = extensions.Evaluator(test_iter, model, device=device)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))
    if comm.rank == 0:
        columns = [
            "main/loss",
            "validation/main/loss",
            "main/accuracy",
            "validation/main/accuracy",
        ]
        trainer.extend(extensions.observe_lr())
        trainer.extend(extensions.LogReport())
        trainer.extend(
            extensions.PrintReport(["epoch", "lr", *columns, "elapsed_time"])
        )
    trainer.run()

    if comm.rank == 0:
        chainer.serializers.save_npz(os.path.join(args.out, "model.npz"), model)


if __name__ == "__main__":
    main()
