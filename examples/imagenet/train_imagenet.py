"""Trains a network on a folder of images, on any number of ranks.

    python make_images.py images                                  a small folder
    mpiexec -n 2 python train_imagenet.py images                  two ranks on this machine
    mpiexec -n 8 python train_imagenet.py FOLDER --gpu --arch resnet50 --size 224 --fp16

Each rank gets the paths of its share, and worker processes read and cut the images. A job that
was killed goes on with `--resume`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainer import training
from chainer.iterators import MultiprocessIterator
from chainer.training import extensions
from convnets import ARCHITECTURES
from images import Images, find_both

# What the examples have in common: how the command line is read, and mistakes are told.
sys.path.append(str(Path(__file__).resolve().parents[1] / "mnist"))

SEED = 0  # of the shares and the first weights
RUN = "imagenet"  # what its checkpoints are called


class MirrorEvaluator(extensions.Evaluator):
    """Judges by the mean of what the network says of an image and of its mirror image.

    It knows nothing of ranks: each evaluates its own images, and create_multi_node_evaluator
    takes the mean, in which a rank counts as much as it has images.
    """

    def evaluate(self) -> dict[str, Any]:
        iterator = self.get_iterator("main")
        iterator.reset()
        model = self.get_target("main")
        loss, right, count = 0.0, 0, 0
        for batch in iterator:
            x, t = self.converter(batch, self.device)
            with chainer.using_config("train", False), chainer.no_backprop_mode():
                views = [model.predictor(view) for view in (x, x[:, :, :, ::-1])]
                scores = [F.softmax(F.cast(view, np.float32)) for view in views]
                chance = F.select_item((scores[0] + scores[1]) / 2, t)
                loss += float(F.sum(-F.log(chance + 1e-7)).array)
                right += int(((scores[0] + scores[1]).array.argmax(axis=1) == t).sum())
            count += len(batch)
        observation: dict[str, Any] = {}
        with chainer.reporter.report_scope(observation):
            chainer.report({"loss": loss / count, "accuracy": right / count}, model)
        return observation


def main(argv: Sequence[str] | None = None) -> None:
    # Before MPI starts: worker processes are then no copies of one that uses it.
    chainermn.iterators.use_forkserver()
    # Not above, where the workers would import it too: it starts MPI.
    from mistakes import create_communicator, stop_if, too_few, too_large

    args = parse_arguments(argv)
    if args.fp16:
        chainer.global_config.dtype = chainer.mixed16
    dtype = "float16" if args.fp16 else None
    comm = create_communicator(args, allreduce_grad_dtype=dtype)
    stop_if(comm, None if args.resume else left_over(args.out))
    device = -1
    if args.gpu:
        device = comm.intra_rank
        chainer.cuda.get_device_from_id(device).use()

    # Rank 0 lists the files; each rank gets the paths of its share.
    train: Any = None
    val: Any = None
    classes: Any = None
    problem = None
    if comm.rank == 0:
        try:
            train, val, classes = find_both(args.folder)
            problem = too_few(len(train), len(val), comm.size)
        except (OSError, ValueError) as error:
            problem = str(error)
    stop_if(comm, problem)
    if comm.rank == 0:
        print(
            f"communicator {args.communicator}, ranks {comm.size}; {len(train)} images of "
            f"{len(classes)} classes to learn, {len(val)} to test; batch {args.batchsize} a rank",
            flush=True,
        )
    n_classes = comm.bcast_obj(None if classes is None else len(classes))
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=SEED)
    val = chainermn.scatter_dataset(val, comm, shuffle=True, seed=SEED, force_equal_length=False)
    stop_if(comm, too_large(args.batchsize, len(train)))
    # The order is one that a resumed run goes on with, whatever workers have fetched ahead.
    order = chainermn.iterators.ResumableOrderSampler([SEED, comm.rank])
    train_iter = MultiprocessIterator(
        Images(train, args.folder / "train", args.size, anywhere=True),
        args.batchsize,
        order_sampler=order,
        n_processes=args.loaderjob,
    )
    val_iter = MultiprocessIterator(
        Images(val, args.folder / "val", args.size, anywhere=False),
        args.batchsize,
        repeat=False,
        shuffle=False,
        n_processes=args.loaderjob,
    )

    np.random.seed(SEED)
    model = L.Classifier(ARCHITECTURES[args.arch](n_classes))
    if args.gpu:
        model.to_gpu()
    actual = chainer.optimizers.MomentumSGD(args.lr)
    if args.fp16:
        actual.use_fp32_update()
        actual.loss_scaling()  # the scale is found while training
    optimizer = chainermn.create_multi_node_optimizer(
        actual, comm, double_buffering=args.double_buffering
    )
    optimizer.setup(model)

    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    # Batch normalization keeps a running mean of what each rank saw: the mean over ranks, first.
    trainer.extend(chainermn.extensions.AllreducePersistent(model, comm))
    evaluator = MirrorEvaluator(val_iter, model, device=device)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))
    if comm.rank == 0:
        report(trainer, model)
    checkpointer = chainermn.create_multi_node_checkpointer(RUN, comm)
    trainer.extend(checkpointer, trigger=(args.checkpoint, "iteration"))
    if args.resume:
        begin = checkpointer.maybe_load(trainer, optimizer)
        if comm.rank == 0:
            print(f"going on from iteration {begin or 0}", flush=True)
    with train_iter, val_iter:
        trainer.run()


def left_over(folder: str) -> str | None:
    """Why a new run can't begin in the folder; None when it can."""
    if not any(Path(folder).glob(f"{RUN}.commit.*")):
        return None
    return (
        f"{folder} has the checkpoints of a run that was killed: go on with it by --resume, "
        "remove them, or name another folder with --out"
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    from options import common_options, parse, positive

    parser = common_options("ChainerMN example: a folder of images", epochs=10)
    add = parser.add_argument
    add("folder", type=Path, help="has train/CLASS/IMAGE and val/CLASS/IMAGE")
    add("--arch", choices=list(ARCHITECTURES), default="small", help="default: %(default)s")
    add("--batchsize", "-b", type=positive, default=32, help="per rank (default: %(default)s)")
    add("--checkpoint", type=positive, default=50, help="iterations between two (%(default)s)")
    add("--double-buffering", action="store_true", help="exchange gradients while computing")
    add("--fp16", action="store_true", help="compute and communicate in 16 bits")
    add(
        "--loaderjob",
        "-j",
        type=positive,
        default=2,
        help="workers per rank (default: %(default)s)",
    )
    add("--lr", type=float, default=0.05, help="learning rate (default: %(default)s)")
    add("--resume", "-r", action="store_true", help="go on from the checkpoints in --out, if any")
    add(
        "--size",
        "-s",
        type=positive,
        default=32,
        help="of the images cut out (default: %(default)s)",
    )
    return parse(parser, argv)


def report(trainer: Any, model: Any) -> None:
    """Add what one rank says for all."""
    curves = ["main/loss", "validation/main/loss", "main/accuracy", "validation/main/accuracy"]
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(["epoch", "iteration", *curves, "elapsed_time"]))
    trainer.extend(extensions.snapshot_object(model, "model.npz"), trigger=(1, "epoch"))


if __name__ == "__main__":
    main()
