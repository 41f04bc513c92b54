"""Trains a network on a folder of images, on any number of ranks.

    python make_images.py images                                  a small folder
    mpiexec -n 2 python train_imagenet.py images                  two ranks on this machine
    mpiexec -n 8 python train_imagenet.py FOLDER --gpu --arch resnet50 --size 224 --fp16

Each rank gets the paths of its share, and worker processes read and cut the images. A
job that was killed goes on with `--resume`.
"""

import argparse
from pathlib import Path

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


class MirrorEvaluator(extensions.Evaluator):
    """Judges by the mean of what the network says of an image and of its mirror image.

    It knows nothing of ranks: each evaluates its own images, and
    create_multi_node_evaluator takes the mean, in which a rank counts as much as it has
    images.
    """

    def evaluate(self):
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
        observation: dict[str, float] = {}
        with chainer.reporter.report_scope(observation):
            chainer.report({"loss": loss / count, "accuracy": right / count}, model)
        return observation


def main():
    parser = argparse.ArgumentParser(
        description="ChainerMN example: a folder of images"
    )
    add = parser.add_argument
    add("folder", type=Path, help="has train/CLASS/IMAGE and val/CLASS/IMAGE")
    add("--communicator", default="hierarchical")
    add("--arch", choices=list(ARCHITECTURES), default="small")
    add("--batchsize", "-b", type=int, default=32, help="of each rank")
    add("--checkpoint", type=int, default=50, help="iterations between two")
    add(
        "--double-buffering",
        action="store_true",
        help="exchange gradients while computing",
    )
    add("--epoch", "-e", type=int, default=10)
    add("--fp16", action="store_true", help="compute and communicate in 16 bits")
    add("--gpu", action="store_true", help="a GPU for each rank of a node")
    add("--loaderjob", "-j", type=int, default=2, help="workers of each rank")
    add("--lr", type=float, default=0.05, help="learning rate")
    add("--out", "-o", default="result", help="folder for what is written")
    add("--resume", "-r", action="store_true", help="go on with a killed job")
    add(
        "--size", "-s", type=int, default=32, help="width and height of what is cut out"
    )
    args = parser.parse_args()

    # Before MPI starts: worker processes are then no copies of one that uses it.
    chainermn.iterators.use_forkserver()
    if args.fp16:
        chainer.global_config.dtype = chainer.mixed16
    dtype = "float16" if args.fp16 else None
    comm = chainermn.create_communicator(args.communicator, allreduce_grad_dtype=dtype)
    device = -1
    if args.gpu:
        device = comm.intra_rank
        chainer.cuda.get_device_from_id(device).use()

    # Rank 0 lists the files; each rank gets the paths of its share.
    train, val, classes = (
        find_both(args.folder) if comm.rank == 0 else (None, None, None)
    )
    classes = comm.bcast_obj(classes)
    if comm.rank == 0:
        print(
            f"{len(train)} images of {len(classes)} classes to learn, {len(val)} to test; "
            f"ranks {comm.size}, batch {args.batchsize} a rank",
            flush=True,
        )
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=0)
    val = chainermn.scatter_dataset(
        val, comm, shuffle=True, seed=0, force_equal_length=False
    )
    # The order is one that a resumed run goes on with, whatever workers have fetched
    # ahead.
    train_iter = MultiprocessIterator(
        Images(train, args.folder / "train", args.size, anywhere=True),
        args.batchsize,
        order_sampler=chainermn.iterators.ResumableOrderSampler([0, comm.rank]),
        n_processes=args.loaderjob,
    )
    val_iter = MultiprocessIterator(
        Images(val, args.folder / "val", args.size, anywhere=False),
        args.batchsize,
        repeat=False,
        shuffle=False,
        n_processes=args.loaderjob,
    )

    np.random.seed(0)  # a run can be repeated
    model = L.Classifier(ARCHITECTURES[args.arch](len(classes)))
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
    # Batch normalization keeps a running mean of what each rank saw: the mean over
    # ranks, first.
    trainer.extend(chainermn.extensions.AllreducePersistent(model, comm))
    evaluator = MirrorEvaluator(val_iter, model, device=device)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))
    if comm.rank == 0:  # one rank reports for all
        columns = [
            "main/loss",
            "validation/main/loss",
            "main/accuracy",
            "validation/main/accuracy",
        ]
        trainer.extend(extensions.LogReport())
        trainer.extend(
            extensions.PrintReport(["epoch", "iteration", *columns, "elapsed_time"])
        )
        trainer.extend(
            extensions.snapshot_object(model, "model.npz"), trigger=(1, "epoch")
        )
    checkpointer = chainermn.create_multi_node_checkpointer("imagenet", comm)
    trainer.extend(checkpointer, trigger=(args.checkpoint, "iteration"))
    if args.resume:
        begin = checkpointer.maybe_load(trainer, optimizer)
        if comm.rank == 0:
            print(f"going on from iteration {begin or 0}", flush=True)
    with train_iter, val_iter:
        trainer.run()
    optimizer.flush()  # with --double-buffering the last gradients are left


if __name__ == "__main__":
    main()
