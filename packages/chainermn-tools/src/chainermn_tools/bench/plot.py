"""Plots the time of a call against the size."""

from __future__ import annotations

import itertools

from chainermn_tools.bench.runner import Report
from chainermn_tools.formatting import format_bytes

# Each line has a mark of its own, so that lines differ without colours, too.
COLORS = "tableau-colorblind10"
MARKS = "osD^vP*X<>h"


def plot_report(report: Report, file: str) -> None:
    """Plot a report into an image file, whose kind follows from the end of its name."""
    from matplotlib import style
    from matplotlib.figure import Figure

    style.use(COLORS)
    figure = Figure((11, 6), layout="constrained")
    figure.suptitle(report.where, fontsize=9, x=0.01, ha="left", wrap=True)
    axes = figure.subplots()
    marks = itertools.cycle(MARKS)
    for title, times in report.times.items():
        axes.plot([*times], [*times.values()], label=title, marker=next(marks))
    axes.set_xscale("log", base=2)
    axes.set_xticks(report.sizes, map(format_bytes, report.sizes))
    axes.set_xticks([], minor=True)
    axes.set_xlabel("size")
    axes.set_yscale("log")
    axes.set_ylabel("seconds of a call")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    figure.savefig(file, dpi=110)
