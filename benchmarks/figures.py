"""Figures that are saved, and axes, all in one style."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chainermn_tools.formatting import format_bytes

# For any kind of eye, and in grey: colours of Okabe and Ito, each with a mark of its
# own.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKS = "osD^vP*"


@contextmanager
def saved_figure(
    file: str | Path,
    title: str,
    rows: int = 1,
    columns: int = 1,
    *,
    figsize: tuple[float, float],  # in inches
    **options: Any,
) -> Iterator[tuple[Any, Any]]:
    """Give a figure and its axes, of shape (rows, columns), and save it; options of ``subplots``.

    Raise ImportError without matplotlib, ValueError if the name ends in no kind of
    image that it knows, and OSError if the file can't be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    figure.suptitle(title, fontsize=9, x=0.01, ha="left", color="#444444", wrap=True)
    yield figure, axes
    figure.savefig(file, dpi=130)


def plain_axes(axes: Any, log_y: bool = False) -> None:
    """Leave out the frame, and write the numbers of a logarithmic y as they are."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(which="major", alpha=0.25)
    if log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda number, _: f"{number:g}")


def size_axis(axes: Any, sizes: Sequence[int]) -> None:
    """Make x logarithmic, with a label at each of the sizes, which are in bytes."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        sizes, [format_bytes(size) for size in sizes], fontsize=8, rotation=45
    )
    axes.set_xticks([], minor=True)
