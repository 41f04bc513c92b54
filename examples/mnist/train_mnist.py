"""Trains a perceptron on handwritten digits, on any number of ranks.

    python train_mnist.py                       one process
    mpiexec -n 2 python train_mnist.py          two ranks on this machine
    mpiexec -n 8 python train_mnist.py --gpu    a GPU for each rank

Rank 0 leaves `log`, `model.npz`, `curves.png` and the graph `cg.dot` in the folder `--out`;
each rank leaves its snapshots there, from which `--resume` goes on. While it runs there are
checkpoints, too: with those a job that was killed in the middle of an epoch goes on from there.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions
from mistakes import create_communicator, stop_if, too_few, too_large
from options import BATCHSIZE, options, parse, positive
from snapshots import CHECKPOINTS, remove_earlier, resume, save_npz, shuffled_by_its_past, snapshot

SEED = 0  # of the split, the shards and the first weights: a run can be repeated
DIGITS_FOR_TRAINING = 1440  # of 1,797
DOWNLOAD_SECONDS = 30.0  # without an answer, until a download is given up


class MLP(chainer.Chain):
    """Three layers, the outer sizes taken from the data."""

    def __init__(self, n_units: int, n_out: int) -> None:
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(None, n_units)
            self.l2 = L.Linear(None, n_units)
            self.l3 = L.Linear(None, n_out)

    def forward(self, x: Any) -> Any:
        return self.l3(F.relu(self.l2(F.relu(self.l1(x)))))


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    comm = create_communicator(args)

    device = -1
    if args.gpu:
        device = comm.intra_rank
        chainer.cuda.get_device_from_id(device).use()

    # Rank 0 reads the data; each rank gets its share.
    train, test = load(args.dataset, comm)
    n_train = comm.bcast_obj(len(train) if comm.rank == 0 else None)
    share = -(-n_train // comm.size)
    args.batchsize = args.batchsize or min(BATCHSIZE, share)
    stop_if(comm, too_large(args.batchsize, share))
    if comm.rank == 0:
        print_header(args, comm, train, test)
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=SEED)
    test = chainermn.scatter_dataset(test, comm, force_equal_length=False)  # none counts twice
    train_iter = chainer.iterators.SerialIterator(
        train, args.batchsize, order_sampler=shuffled_by_its_past
    )
    test_iter = chainer.iterators.SerialIterator(test, args.batchsize, repeat=False, shuffle=False)

    np.random.seed(SEED)
    model = L.Classifier(MLP(args.unit, 10))
    if args.gpu:
        model.to_gpu()
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(), comm, double_buffering=args.double_buffering
    )
    optimizer.setup(model)

    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    evaluator = extensions.Evaluator(test_iter, model, device=device)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))
    trainer.extend(snapshot(comm))
    if comm.rank == 0:
        ranks = f"{comm.size} rank{'s' if comm.size > 1 else ''}"
        report(trainer, model, title=f"{args.dataset}, {ranks}, {args.communicator}")

    checkpointer = chainermn.create_multi_node_checkpointer(CHECKPOINTS, comm)
    trainer.extend(checkpointer, trigger=(args.checkpoint, "iteration"))
    elsewhere = args.resume and not same_folder(args.resume, args.out)
    # There are checkpoints only where a run was killed; else its last snapshots serve.
    if (
        args.resume
        and checkpointer.maybe_load(trainer, optimizer, path=args.resume if elsewhere else None)
        is None
    ):
        resume(trainer, args.resume, comm)
    if elsewhere or not args.resume:
        remove_earlier(args.out, comm)
    trainer.run()

    if comm.rank == 0:
        print_results(trainer, "model.npz and curves.png")


def same_folder(one: str, other: str) -> bool:
    return os.path.exists(one) and os.path.samefile(one, other)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = options("ChainerMN example: handwritten digits")
    parser.add_argument(
        "--resume", "-r", metavar="FOLDER", help="go on with the run in FOLDER, killed or finished"
    )
    parser.add_argument(
        "--checkpoint", type=positive, default=20, help="iterations between two (%(default)s)"
    )
    parser.add_argument(
        "--double-buffering", action="store_true", help="exchange gradients while computing"
    )
    return parse(parser, argv)


def load(name: str, comm: Any) -> tuple[Any, Any]:
    """The training and the test set on rank 0, None elsewhere (collective)."""
    train, test, problem = None, None, None
    if comm.rank == 0:
        try:
            train, test = load_mnist() if name == "mnist" else load_digits()
            problem = too_few(len(train), len(test), comm.size)
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            problem = f"--dataset {name}: {error}"
    stop_if(comm, problem)
    return train, test


def load_digits() -> tuple[Any, Any]:
    """The 8 x 8 digits that come with scikit-learn: 64 float32 in 0..1, and an int32 label."""
    import sklearn.datasets

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.RandomState(SEED).permutation(len(images))
    x, y = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    cut = DIGITS_FOR_TRAINING
    return (
        chainer.datasets.TupleDataset(x[:cut], y[:cut]),
        chainer.datasets.TupleDataset(x[cut:], y[cut:]),
    )


def load_mnist() -> tuple[Any, Any]:
    """Chainer's MNIST, 28 x 28, which is downloaded when it was not before."""
    socket.setdefaulttimeout(DOWNLOAD_SECONDS)
    try:
        train, test = chainer.datasets.get_mnist()
        return train, test
    except OSError as error:
        folder = os.path.join(chainer.dataset.get_dataset_root(), "pfnet", "chainer", "mnist")
        raise OSError(
            f"could not download it ({error}); put train.npz and test.npz into {folder}, "
            "or use --dataset digits"
        ) from error


def print_header(args: argparse.Namespace, comm: Any, train: Any, test: Any) -> None:
    print(
        f"communicator {args.communicator}, ranks {comm.size}, nodes {comm.inter_size}, "
        f"{'GPU' if args.gpu else 'CPU'}; {args.dataset}: {len(train)} training and "
        f"{len(test)} test examples; batch {args.batchsize} a rank",
        flush=True,
    )


def report(trainer: Any, model: Any, title: str) -> None:
    """Add what one rank says for all: the table, the curves, the graph, the model."""
    import matplotlib

    matplotlib.use("Agg")  # files only; nothing to show on a screen
    curves = ["main/loss", "validation/main/loss", "main/accuracy", "validation/main/accuracy"]

    trainer.extend(extensions.dump_graph("main/loss"))
    trainer.extend(extensions.LogReport())
    trainer.extend(
        extensions.PlotReport(
            curves,
            x_key="epoch",
            filename="curves.png",
            marker=None,
            postprocess=lambda figure, axes, _: two_panels(figure, axes, title),
        )
    )
    trainer.extend(extensions.PrintReport(["epoch", *curves, "elapsed_time"]))
    trainer.extend(extensions.ProgressBar(update_interval=5))
    trainer.extend(
        extensions.snapshot_object(model.predictor, "model.npz", savefun=save_npz),
        trigger=(1, "epoch"),
    )


def two_panels(figure: Any, axes: Any, title: str) -> None:
    """Part the four curves that PlotReport drew on `axes`: loss left, accuracy right."""
    curves = {line.get_label(): line.get_data() for line in axes.get_lines()}
    axes.clear()  # and keep it as the right one: PlotReport puts the legend beside it
    axes.set_subplotspec(figure.add_gridspec(1, 2)[1])
    panels = {"loss": figure.add_subplot(121), "accuracy": axes}
    figure.set_size_inches(10, 4)
    figure.set_dpi(120)
    for key, (epochs, values) in curves.items():
        label, color = ("validation", "C1") if key.startswith("validation") else ("training", "C0")
        panel = panels[key.rpartition("/")[2]]
        panel.plot(epochs, values, marker="o", markersize=3, color=color, label=label)
    for name, panel in panels.items():
        panel.set(xlabel="epoch", ylabel=name)
        panel.locator_params(axis="x", integer=True)
        panel.grid(alpha=0.3)
    panels["loss"].set_yscale("log")
    panels["loss"].yaxis.set_major_formatter("{x:g}")
    panels["loss"].set_title(title, loc="left")
    last = curves["validation/main/accuracy"][1][-1]
    panels["accuracy"].set_title(f"validation accuracy {last:.3f}", loc="left")


def print_results(trainer: Any, files: str) -> None:
    last = trainer.get_extension("LogReport").log[-1]
    print(
        f"validation accuracy {last['validation/main/accuracy']:.4f} after {last['epoch']} epochs "
        f"and {last['elapsed_time']:.1f} s; log, {files} are in {trainer.out}",
        flush=True,
    )


if __name__ == "__main__":
    main()
