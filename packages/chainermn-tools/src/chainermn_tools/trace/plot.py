"""Plots what each rank did over the whole run, and the calls around the longest wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from chainermn_tools.trace.table import Run
from chainermn_tools.trace.timeline import shares

# For any kind of eye: colours of Okabe and Ito.
COLORS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#d55e00")
OTHERS_COLOR, WAITING_COLOR, COMPUTING_COLOR = "#8a8f98", "#f2c14e", "#eceef1"
MOVING_COLOR = "#0072b2"
PALE = 0.65
# Of the whole time, and calls of a rank that are shown around the longest wait.
BINS, CALLS_AROUND = 400, 12
MOST_RANKS = 32


def plot_run(run: Run, collectives: np.ndarray, file: str) -> None:
    """Draw a run whose times are aligned and whose calls are matched into an image file."""
    from matplotlib.figure import Figure

    ranks = list(run.ranks)[:MOST_RANKS]
    height = 0.34 * len(ranks)
    figure = Figure(figsize=(13, 3.6 + 2 * height), layout="constrained")
    whole, part = figure.subplots(2, 1)
    more = f", the first {len(ranks)}" if len(ranks) < len(run.ranks) else ""
    figure.suptitle(
        f"Run {run.name}, {len(run.ranks)} ranks{more}", x=0.01, ha="left", fontsize=10
    )
    _whole(whole, run, ranks)
    start, end = _window(run, collectives)
    _part(part, run, ranks, start, end)
    for axes in (whole, part):
        axes.set_yticks(
            range(len(ranks)), [f"rank {rank}" for rank in ranks], fontsize=9
        )
        axes.set_ylim(len(ranks) - 0.4, -0.6)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.legend(
            loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False
        )
    figure.savefig(file, dpi=130)


def _whole(axes: Any, run: Run, ranks: Sequence[int]) -> None:
    """Plot a bar for each rank, in bins: the shares of waiting, moving data, and the rest."""
    length = run.table["end"].max(initial=0.0) / 1e6 or 1.0
    edges = np.linspace(0, length, BINS + 1)
    for row, rank in enumerate(ranks):
        waiting, inside = shares(run.ranks[rank].rows, edges * 1e6)
        bottom = np.full(BINS, row + 0.4)
        for part, color, label in (
            (waiting, WAITING_COLOR, "waiting for a rank"),
            (inside - waiting, MOVING_COLOR, "moving data"),
            (1 - inside, COMPUTING_COLOR, "in no call"),
        ):
            top = bottom - 0.8 * part
            steps = [np.append(values, values[-1]) for values in (bottom, top)]
            name = "" if row else label
            axes.fill_between(
                edges, *steps, step="post", color=color, linewidth=0, label=name
            )
            bottom = top
    axes.set_xlim(0, length)
    axes.set_xlabel("seconds", fontsize=9)
    axes.set_title(
        "The whole run: how each rank spends its time", loc="left", fontweight="bold"
    )


def _window(run: Run, collectives: np.ndarray) -> tuple[float, float]:
    """Return the microseconds between which single calls are shown: around the longest wait."""
    starts = np.sort(run.table["start"])
    if not len(starts):
        return 0.0, 1.0
    center = starts[len(starts) // 2]
    if len(collectives):
        center = collectives["start"][np.argmax(collectives["waited"])]
    index, around = (
        int(np.searchsorted(starts, center)),
        CALLS_AROUND // 2 * len(run.ranks),
    )
    first, last = (
        float(starts[max(0, index - around)]),
        float(starts[index:][:around][-1]),
    )
    margin = 0.02 * (last - first) or 1.0
    return max(0.0, first - margin), last + margin


def _part(axes: Any, run: Run, ranks: Sequence[int], start: float, end: float) -> None:
    """Plot each call as a bar in its operation's colour; what of it was waiting is pale."""
    scale, unit = (1e6, "seconds") if end - start > 2e6 else (1e3, "milliseconds")
    shown = run.table[(run.table["end"] > start) & (run.table["start"] < end)]
    numbers, counts = np.unique(shown["operation"], return_counts=True)
    operations = numbers[np.argsort(-counts, kind="stable")].tolist()
    colors = dict(zip(operations, COLORS, strict=False))
    for operation in operations:
        color = colors.get(operation, OTHERS_COLOR)
        for row, rank in enumerate(ranks):
            calls = shown[(shown["operation"] == operation) & (shown["rank"] == rank)]
            begin, length = (
                (calls["start"] - start) / scale,
                calls["end"] - calls["start"],
            )
            spans = np.stack([begin, length / scale], axis=1)
            waits = np.stack([begin, calls["waited"] / scale], axis=1)[
                calls["waited"] > 0
            ]
            axes.broken_barh(
                spans, (row - 0.36, 0.72), color=color, linewidth=0.4, edgecolor="w"
            )
            axes.broken_barh(
                waits, (row - 0.36, 0.72), color="w", linewidth=0, alpha=PALE
            )
    for operation, color in colors.items():
        axes.barh(0, 0, color=color, label=run.names[operation])
    if len(operations) > len(colors):
        axes.barh(0, 0, color=OTHERS_COLOR, label="others")
    axes.barh(0, 0, color=OTHERS_COLOR, alpha=1 - PALE, label="pale: waiting")
    axes.set_xlim(0, (end - start) / scale)
    axes.set_xlabel(f"{unit} after {start / 1e6:.6f} s", fontsize=9)
    axes.set_title("Calls around the longest wait", loc="left", fontweight="bold")
