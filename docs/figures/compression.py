"""Makes the picture of how training with PowerSGD goes on, by training on handwritten digits.

    mpiexec -n 2 python docs/figures/compression.py

Each way trains the example's perceptron from some seeds. A line is the mean accuracy on
the test data, and the band around it reaches from the worst seed to the best.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import chainer
import chainer.links as L
import chainermn
import numpy as np
from PIL import Image

FIGURES = Path(__file__).resolve().parent
EXAMPLE = FIGURES.parents[1] / "examples/mnist"
WAYS = {
    "whole gradients": None,
    "PowerSGD(start_step=100)": chainermn.PowerSGD(),
    "PowerSGD(start_step=0)": chainermn.PowerSGD(start_step=0),
}
COLORS = ("0.4", "C0", "C1")
SEEDS = 8
EPOCHS = 20
BATCH = 100  # of each rank


def arrays_of(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return all examples of a data set, and their labels."""
    x, t = zip(*dataset, strict=True)
    return np.array(x), np.array(t)


def accuracies(comm: Any, compression: Any, seed: int) -> list[float]:
    """Return the accuracy on the test data after each epoch (collective)."""
    sys.path.insert(0, str(EXAMPLE))
    from train_mnist import MLP, load_digits

    (x, t), (test_x, test_t) = map(arrays_of, load_digits())
    np.random.seed(seed)
    model = L.Classifier(MLP(300))
    model(x[:1], t[:1])
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(), comm, compression=compression
    ).setup(model)
    random = np.random.RandomState(seed)
    found = []
    for _ in range(EPOCHS):
        order = random.permutation(len(x))
        for start in range(0, len(x) - comm.size * BATCH + 1, comm.size * BATCH):
            first = start + comm.rank * BATCH
            own = order[first : first + BATCH]
            optimizer.update(model, x[own], t[own])
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            scores = model.predictor(test_x).array
        found.append(float((scores.argmax(axis=1) == test_t).mean()))
    return found


def draw(results: dict[str, np.ndarray], path: Path) -> None:
    """Draw the results, whose rows are seeds and whose columns are epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    epochs = np.arange(1, EPOCHS + 1)
    for (name, curves), color in zip(results.items(), COLORS, strict=True):
        axes.plot(epochs, curves.mean(axis=0), color=color, label=name)
        axes.fill_between(
            epochs,
            curves.min(axis=0),
            curves.max(axis=0),
            color=color,
            alpha=0.15,
            lw=0,
        )
    axes.set_ylim(0.85, 1)
    axes.set_xticks(epochs[4::5])
    axes.set_xlabel("epoch (7 steps)")
    axes.set_ylabel("accuracy on test data")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=100)
    with Image.open(path) as image:
        image.convert("RGB").quantize(64).save(path, optimize=True)


def main() -> None:
    comm = chainermn.create_communicator()
    results = {}
    for name, compression in WAYS.items():
        curves = [accuracies(comm, compression, seed) for seed in range(SEEDS)]
        results[name] = np.array(curves)
        if comm.rank == 0:
            print(
                f"{name}: {results[name][:, [4, -1]].mean(axis=0)} after 5, 20 epochs"
            )
    if comm.rank == 0:
        draw(results, FIGURES / "compression.png")


if __name__ == "__main__":
    main()
