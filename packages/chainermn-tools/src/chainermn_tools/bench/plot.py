"""Plots bus bandwidth against size: gradients, and the other operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chainermn_tools.bench.operations import BASELINES, MEAN_GRAD
from chainermn_tools.bench.text import label, title
from chainermn_tools.formatting import format_bytes

# For any kind of eye, and in grey: colours of Okabe and Ito, each with a mark of its
# own.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKS = "osD^vP*"
BASELINE_STYLES = ("--", ":")
BASELINE_COLOR = "#7a7f87"


def plot_report(report: dict[str, Any], file: str) -> None:
    """Plot a report into an image file, of the kind that its name ends in."""
    from matplotlib.figure import Figure

    rows = [row for row in report["results"] if row.get("seconds") and row["correct"]]
    value = "busbw" if report["ranks"] > 1 else "algbw"  # which is 0 for one rank
    baselines = [row for row in rows if row["operation"] in BASELINES]
    panels = (
        ("Mean of gradients", [row for row in rows if row["operation"] == MEAN_GRAD]),
        (
            "Arrays",
            [row for row in rows if row["operation"] not in (MEAN_GRAD, *BASELINES)],
        ),
    )
    figure = Figure((12, 5.6), layout="constrained")
    figure.suptitle(
        title(report), fontsize=9, x=0.01, ha="left", color="#444444", wrap=True
    )
    places = figure.subplots(1, 2, sharey=True)
    for axes, (name, own) in zip(places, panels, strict=True):
        _panel(axes, own, baselines, value)
        axes.set_title(name, loc="left", fontsize=12, fontweight="bold")
        axes.set_xlabel("size")
        axes.tick_params(labelleft=True)
    places[0].set_ylabel(
        f"{'bus' if value == 'busbw' else 'algorithm'} bandwidth, GB/s"
    )
    figure.savefig(file, dpi=130)


def _panel(
    axes: Any,
    own: Sequence[dict[str, Any]],
    baselines: Sequence[dict[str, Any]],
    value: str,
) -> None:
    for number, (name, line) in enumerate(_lines(baselines, value).items()):
        style = BASELINE_STYLES[number % len(BASELINE_STYLES)]
        axes.plot(*line, style, color=BASELINE_COLOR, lw=1.6, label=name, zorder=1)
    for number, (name, line) in enumerate(_lines(own, value).items()):
        color, mark = COLORS[number % len(COLORS)], MARKS[number % len(MARKS)]
        axes.plot(
            *line,
            marker=mark,
            color=color,
            lw=1.8,
            ms=5.5,
            label=name,
            zorder=2 + 1 / (number + 1),
        )
    sizes = sorted({row["size"] for row in (*own, *baselines)})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, map(format_bytes, sizes), fontsize=8, rotation=45)
    axes.set_xticks([], minor=True)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(which="major", alpha=0.25)
    if own or baselines:
        axes.legend(loc="lower right", fontsize=9, frameon=False)


def _lines(
    rows: Sequence[dict[str, Any]], value: str
) -> dict[str, tuple[list[int], list[float]]]:
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        line = found.setdefault(label(row), ([], []))
        if row[value] > 0:
            line[0].append(row["size"])
            line[1].append(row[value])
    return found
