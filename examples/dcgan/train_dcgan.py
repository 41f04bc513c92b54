"""Trains two networks against each other, one of which learns to write digits.

    mpiexec -n 2 python train_dcgan.py

Each rank has its share of scikit-learn's digits, and both networks; each network has a
multi-node optimizer of its own. Rank 0 leaves `log`, pictures of what the generator
writes (`epoch_05.png` and so on) and its weights (`generator.npz`) in the folder
`--out`.
"""

import argparse
import os

import chainer
import chainermn
import numpy as np
import sklearn.datasets
from chainer import training
from chainer.training import extensions
from networks import Discriminator, Generator
from PIL import Image
from updater import DCGANUpdater

ROWS, COLUMNS = 8, 16  # of digits in a picture
ENLARGED = 4  # pixels of a picture for each of a digit, both ways


def load_digits():
    """The 1,797 digits, float32 of shape (1, 8, 8) in -1..1, without what they are."""
    x, _ = sklearn.datasets.load_digits(return_X_y=True)
    return (x / 8 - 1).astype(np.float32).reshape(-1, 1, 8, 8)


def make_optimizer(model, comm, alpha):
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(alpha=alpha, beta1=0.5), comm
    )
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-4))
    return optimizer


def write_picture(generator, path):
    """What the generator makes of the same random numbers each time (not collective)."""
    z = generator.xp.asarray(generator.draw(ROWS * COLUMNS, np.random.RandomState(0)))
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        x = chainer.backends.cuda.to_cpu(generator(z).array)
    x = np.pad(
        x.reshape(ROWS, COLUMNS, 8, 8),
        [(0, 0), (0, 0), (1, 1), (1, 1)],
        constant_values=-1,
    )
    x = x.transpose(0, 2, 1, 3).reshape(ROWS * 10, COLUMNS * 10)
    image = Image.fromarray(((1 - x) * 127.5).astype(np.uint8))  # dark on light
    size = image.width * ENLARGED, image.height * ENLARGED
    image.resize(size, Image.Resampling.NEAREST).save(path)


def main():
    parser = argparse.ArgumentParser(
        description="ChainerMN example: digits that nobody wrote"
    )
    parser.add_argument("--communicator", default="hierarchical")
    parser.add_argument(
        "--gpu", action="store_true", help="a GPU for each rank of a node"
    )
    parser.add_argument("--batchsize", "-b", type=int, default=32, help="of each rank")
    parser.add_argument("--epoch", "-e", type=int, default=40)
    parser.add_argument(
        "--picture", type=int, default=5, help="epochs between two pictures"
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

    # A run can be repeated; each rank draws other random numbers.
    np.random.seed(comm.rank)
    digits = load_digits() if comm.rank == 0 else None
    if comm.rank == 0:
        print(f"{len(digits)} digits; ranks {comm.size}", flush=True)
    digits = chainermn.scatter_dataset(digits, comm, shuffle=True, seed=0)
    iterator = chainer.iterators.SerialIterator(digits, args.batchsize)

    generator, discriminator = Generator(), Discriminator()
    if args.gpu:
        generator.to_gpu()
        discriminator.to_gpu()
    optimizers = {
        "generator": make_optimizer(generator, comm, alpha=1e-3),
        "discriminator": make_optimizer(discriminator, comm, alpha=5e-4),
    }
    updater = DCGANUpdater(
        models=(generator, discriminator),
        iterator=iterator,
        optimizer=optimizers,
        device=device,
    )
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    # The running means of batch normalization, with which rank 0 makes its pictures.
    trainer.extend(chainermn.extensions.AllreducePersistent(generator, comm))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        columns = ["generator/loss", "discriminator/loss", "discriminator/accuracy"]
        trainer.extend(
            extensions.PrintReport(["epoch", "iteration", *columns, "elapsed_time"])
        )

        @training.make_extension(trigger=(args.picture, "epoch"))
        def picture(trainer):
            name = f"epoch_{trainer.updater.epoch:02}.png"
            write_picture(generator, os.path.join(trainer.out, name))

        trainer.extend(picture)

    trainer.run()

    if comm.rank == 0:
        chainer.serializers.save_npz(os.path.join(args.out, "generator.npz"), generator)


if __name__ == "__main__":
    main()
