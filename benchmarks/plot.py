"""The times as a picture: a panel for each model, a row for each case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import plain_axes, saved_figure
from peers import ALL_RANKS, HANDOFF
from report import cores, heading, number, title

COLORS = {"copy": "#8a8f98", "mpi": "#b08a3e", "bundled": "#c2543d", "ours": "#2f6fb3"}
FLOORS = {ALL_RANKS: ":", HANDOFF: "--"}  # drawn as lines through the panel
MEANING = {
    "copy": "only moving the bytes",
    "mpi": "raw MPI",
    "bundled": "ChainerMN bundled with Chainer 7",
    "ours": "this ChainerMN",
}


def draw(results: dict[str, Any], file: Path) -> None:
    """Draw medians with quartiles and extremes into an image file."""
    from matplotlib.lines import Line2D

    models = results["models"]
    size = 9, 1.3 + len(models) * (0.9 + 0.27 * len(_shown(models[0])))
    marks = [
        Line2D([], [], marker="o", ls="", color=COLORS[k], label=MEANING[k])
        for k in COLORS
    ]
    marks += [
        Line2D([], [], ls=style, color=COLORS["copy"], label=f"median of {name}")
        for name, style in FLOORS.items()
    ]
    with saved_figure(file, heading(results), len(models), figsize=size) as (
        figure,
        panels,
    ):
        for axes, model in zip(panels[:, 0], models, strict=True):
            _panel(axes, model)
            axes.set_title(title(model), loc="left", fontsize=11, fontweight="bold")
            axes.set_xlabel(
                "milliseconds   ·   " + cores(model, results["rounds"]), fontsize=8
            )
        figure.legend(
            handles=marks,
            loc="outside lower center",
            ncols=3,
            frameon=False,
            fontsize=8,
        )


def _shown(model: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in model["cases"] if row["kind"] in COLORS]


def _panel(axes: Any, model: dict[str, Any]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    def said(row: dict[str, Any]) -> str:
        return f"{number(row['median_ms'])} ms"

    def remark(row: dict[str, Any]) -> str:
        ours = row["kind"] == "ours"
        return f"  ({number(row['over_bundled'][1])} x bundled)" if ours else ""

    rows = _shown(model)
    draw_rows(axes, rows, said, remark)
    for row in rows:
        if row["name"] in FLOORS:
            style, color = FLOORS[row["name"]], COLORS[row["kind"]]
            axes.axvline(row["median_ms"], color=color, ls=style, lw=1.2, zorder=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def draw_rows(
    axes: Any,
    rows: list[dict[str, Any]],
    time: Callable[[dict[str, Any]], str],
    remark: Callable[[dict[str, Any]], str] = lambda row: "",
    scale: float = 1,
) -> None:
    """Draw a row for each case: its median, quartiles and extremes.

    Args:
        axes: an empty panel.
        rows: what `measure` returned, with medians.
        time: the text at the right edge, from a row.
        remark: what follows it.
        scale: the unit of the axis in milliseconds is one over this.
    """
    import numpy as np

    for y, row in enumerate(rows):
        low, first, third, high = np.percentile(row["ms"], (0, 25, 75, 100)) * scale
        color = COLORS[row["kind"]]
        axes.plot([low, high], [y, y], color=color, lw=1)
        axes.plot(
            [first, third], [y, y], color=color, lw=5, alpha=0.45, solid_capstyle="butt"
        )
        axes.plot(row["median_ms"] * scale, y, "o", color=color, ms=7)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row["kind"] == "ours" else "normal")
    right = axes.secondary_yaxis("right")
    texts = [time(row) + "  WRONG" * (not row["right"]) + remark(row) for row in rows]
    right.set_yticks(range(len(rows)), texts, fontsize=9)
    right.tick_params(length=0)
    right.spines.right.set_visible(False)
    plain_axes(axes)
    axes.spines.left.set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
