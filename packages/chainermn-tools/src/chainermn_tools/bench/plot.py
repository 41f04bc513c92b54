"""Plots the time of a call against the size."""

from __future__ import annotations

import itertools
from typing import Any

from chainermn_tools.bench.runner import Report
from chainermn_tools.formatting import format_bytes

# For any kind of eye, and in grey: colours of Okabe and Ito, each with a mark of its
# own.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKS = "osD^vP*X<>h"
BASELINE_STYLES = ("--", ":")
BASELINE_COLOR = "#7a7f87"


def plot_report(report: Report, file: str) -> None:
    """Plot a report into an image file, of the kind that its name ends in."""
    from matplotlib.figure import Figure

    figure = Figure((11, 6), layout="constrained")
    figure.suptitle(report.where, fontsize=9, x=0.01, ha="left", wrap=True)
    axes = figure.subplots()
    looks = itertools.cycle(zip(itertools.cycle(COLORS), MARKS, strict=False))
    styles = itertools.cycle(BASELINE_STYLES)
    for title, times in report.times.items():
        if title in report.baselines:
            look: dict[str, Any] = {"linestyle": next(styles), "color": BASELINE_COLOR}
        else:
            color, mark = next(looks)
            look = {"marker": mark, "color": color}
        axes.plot([*times], [*times.values()], label=title, **look)
    axes.set_xscale("log", base=2)
    axes.set_xticks(report.sizes, map(format_bytes, report.sizes))
    axes.set_xticks([], minor=True)
    axes.set_xlabel("size")
    axes.set_yscale("log")
    axes.set_ylabel("seconds of a call")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    figure.savefig(file, dpi=110)
