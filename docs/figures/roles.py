"""Draws which rank does what: data parallelism, model parallelism, both at once, and the inside.

python docs/figures/roles.py
"""

from __future__ import annotations

from parts import BLUE, GREEN, GREY, ORANGE, arrow, box, frame, label, save, sheet


def data_parallel() -> None:
    """Each rank its own examples, the whole model, and the mean of all gradients."""
    figure, axes = sheet(7.6, 3.1)
    for rank in range(2):
        left = 0.1 + rank * 3.95
        middle = left + 1.72
        frame(axes, left, 0.1, 3.45, 2.9, f"rank {rank}")
        box(axes, middle, 2.45, f"its half of the examples, batch {rank}", GREY, 3.1)
        box(axes, middle, 1.85, "the whole model: loss and gradients", BLUE, 3.1)
        box(axes, middle, 1.1, "mean of all ranks' gradients", ORANGE, 3.1)
        box(axes, middle, 0.45, "the same step: models stay equal", BLUE, 3.1)
        for above, below in ((2.28, 2.02), (1.68, 1.27), (0.93, 0.62)):
            arrow(axes, (middle, above), (middle, below))
    arrow(axes, (3.4, 1.1), (4.2, 1.1), ORANGE, arrowstyle="<|-|>")
    label(axes, 3.8, 1.27, "MPI", ORANGE)
    save(figure, "data-parallel")


def chain() -> None:
    """Layers on two ranks, as MultiNodeChainList sends what they return."""
    figure, axes = sheet(7.6, 3.1)
    frame(axes, 0.15, 0.1, 3.1, 2.9, "rank 0: images, labels")
    frame(axes, 4.35, 0.1, 3.1, 2.9, "rank 1: no examples")
    box(axes, 1.7, 2.3, "First(images)", BLUE, 2.4)
    box(axes, 5.9, 1.55, "Middle(h)", BLUE, 2.4)
    box(axes, 1.7, 0.8, "Last(h), then the loss", BLUE, 2.4)
    arrow(axes, (2.93, 2.3), (4.68, 1.65), GREEN)
    arrow(axes, (4.68, 1.55), (2.93, 0.9), GREEN)
    arrow(axes, (2.93, 0.65), (4.68, 1.38), ORANGE, ls="--")
    arrow(axes, (4.68, 1.8), (2.93, 2.43), ORANGE, ls="--")
    label(axes, 4.0, 2.38, "gradients", ORANGE)
    label(axes, 3.8, 1.58, "activations", GREEN)
    label(axes, 1.7, 0.4, "backward begins here", GREY)
    label(axes, 5.9, 0.4, "backward of the delegate variable", GREY)
    save(figure, "chain")


def both() -> None:
    """Two copies of a model of two parts: which ranks are in which communicator."""
    figure, axes = sheet(7.6, 3.0)
    names = {0: "First, Last", 1: "Middle", 2: "First, Last", 3: "Middle"}
    for rank, name in names.items():
        copy, part = divmod(rank, 2)
        x, y = 2.2 + part * 3.8, 2.05 - copy * 1.35
        box(axes, x, y, f"rank {rank}: {name}", BLUE if part == 0 else GREEN, 1.8)
    for copy in range(2):
        y = 2.05 - copy * 1.35
        arrow(axes, (3.13, y), (5.07, y), GREY, arrowstyle="<|-|>")
        label(axes, 4.1, y + 0.18, f"one model: split({copy}, rank)")
    for part, color in ((0, BLUE), (1, GREEN)):
        x = 2.2 + part * 3.8
        arrow(axes, (x, 1.85), (x, 0.9), color, arrowstyle="<|-|>")
        label(
            axes,
            x + 0.08,
            1.38,
            f"mean of gradients:\nsplit({part}, rank)",
            color,
            ha="left",
        )
    label(axes, 0.15, 2.05, "half of\nthe examples", ha="left")
    label(axes, 0.15, 0.7, "the other\nhalf", ha="left")
    save(figure, "both")


def columns() -> None:
    """A matrix divided by columns, and the next one by rows."""
    figure, axes = sheet(7.6, 2.7)
    label(axes, 0.55, 1.35, "x\n(on both)", GREY)
    for rank, color in ((0, BLUE), (1, GREEN)):
        y = 1.95 - rank * 1.2
        frame(axes, 1.2, y - 0.5, 4.9, 1.05, f"rank {rank}")
        box(axes, 2.45, y - 0.1, "half of W's outputs", color, 1.9)
        box(axes, 4.85, y - 0.1, "half of V's inputs", color, 1.9)
        arrow(axes, (0.85, 1.35), (1.48, y - 0.1))
        arrow(axes, (3.42, y - 0.1), (3.88, y - 0.1))
        arrow(axes, (5.82, y - 0.1), (6.45, 1.3), ORANGE)
    label(axes, 2.45, 0.1, "ColumnParallelLinear")
    label(axes, 4.85, 0.1, "RowParallelLinear")
    label(axes, 6.95, 1.3, "sum: y\n(on both)", ORANGE)
    save(figure, "columns")


def nodes() -> None:
    """The way of a chunk in `hierarchical`: two nodes of two ranks."""
    figure, axes = sheet(7.6, 2.9)
    for node in range(2):
        left = 0.15 + node * 3.9
        frame(axes, left, 0.1, 3.4, 2.7, f"node {node}")
        for i in range(2):
            rank = node * 2 + i
            x = left + 0.9 + i * 1.6
            box(axes, x, 2.2, f"rank {rank}", BLUE, 1.2)
            arrow(axes, (x, 2.02), (x, 1.6), GREEN, arrowstyle="<|-|>")
        box(axes, left + 1.7, 1.42, "memory that both map: slots", GREEN, 3.0)
        arrow(axes, (left + 0.9, 1.24), (left + 0.9, 0.82), ORANGE, arrowstyle="<|-|>")
        box(axes, left + 0.9, 0.64, f"rank {node * 2} exchanges", ORANGE, 1.5)
    arrow(axes, (1.82, 0.64), (4.18, 0.64), ORANGE, arrowstyle="<|-|>")
    label(axes, 3.0, 0.42, "MPI", ORANGE)
    save(figure, "nodes")


if __name__ == "__main__":
    for draw in (data_parallel, chain, both, columns, nodes):
        draw()
