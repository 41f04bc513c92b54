"""Draws a run: what each rank did over the whole time, and the calls around the longest wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from chainermn_tools.trace.reading import Call, Run
from chainermn_tools.trace.waiting import Meeting

# For any kind of eye: colours of Okabe and Ito.
COLORS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#d55e00")
OTHERS_COLOR, WAITING_COLOR, COMPUTING_COLOR = "#8a8f98", "#f2c14e", "#eceef1"
MOVING_COLOR = "#0072b2"
PALE = 0.65
# Of the whole time, and calls of a rank that are shown around the longest wait.
BINS, CALLS_AROUND = 400, 12
MOST_RANKS = 32


def draw(run: Run, meetings: Sequence[Meeting], file: str) -> None:
    """Draw a run whose times are aligned and whose calls are matched.

    Raises:
        ImportError: there is no matplotlib.
        ValueError: the name ends in no kind of image that matplotlib knows.
        OSError: the file can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ranks = list(run.ranks)[:MOST_RANKS]
    height = 0.34 * len(ranks)
    figure, (whole, part) = plt.subplots(2, 1, figsize=(13, 3.6 + 2 * height), layout="constrained")
    more = f", the first {len(ranks)}" if len(ranks) < len(run.ranks) else ""
    figure.suptitle(f"Run {run.name}, {len(run.ranks)} ranks{more}", x=0.01, ha="left", fontsize=10)
    _whole(whole, run, ranks)
    start, end = _window(run, meetings)
    _part(part, run, ranks, start, end)
    for axes in (whole, part):
        axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks], fontsize=9)
        axes.set_ylim(len(ranks) - 0.4, -0.6)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _whole(axes: Any, run: Run, ranks: Sequence[int]) -> None:
    """A bar for each rank, cut into bins: the shares of waiting, moving data, and the rest."""
    length = max((call.end for call in run.calls), default=0.0) / 1e6 or 1.0
    edges = np.linspace(0, length, BINS + 1)
    for row, rank in enumerate(ranks):
        waiting, moving = _shares(run.ranks[rank].calls, edges)
        bottom = np.full(BINS, row + 0.4)
        for shares, color, label in (
            (waiting, WAITING_COLOR, "waiting for a rank"),
            (moving, MOVING_COLOR, "moving data"),
            (1 - waiting - moving, COMPUTING_COLOR, "in no call"),
        ):
            top = bottom - 0.8 * shares
            steps = [np.append(values, values[-1]) for values in (bottom, top)]
            name = "" if row else label
            axes.fill_between(edges, *steps, step="post", color=color, linewidth=0, label=name)
            bottom = top
    axes.set_xlim(0, length)
    axes.set_xlabel("seconds", fontsize=9)
    axes.set_title("The whole run: how each rank spends its time", loc="left", fontweight="bold")


def _shares(calls: Sequence[Call], edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each bin, the shares that calls waited and moved data."""
    waits = np.array([(call.start, call.start + call.waited) for call in calls]) / 1e6
    whole = np.array([(call.start, call.end) for call in calls]) / 1e6
    waiting, inside = _covered(waits, edges), _covered(whole, edges)
    inside = np.minimum(inside, 1)  # calls of several threads
    waiting = np.minimum(waiting, inside)
    return waiting, inside - waiting


def _covered(spans: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """How much of each bin the spans (start, end) cover."""
    spans = spans.reshape(-1, 2)
    starts, ends = np.sort(spans[:, 0]), np.sort(spans[:, 1])
    # Seconds covered before each edge: of all that began, what had passed of them by then.
    until = _passed(starts, edges) - _passed(ends, edges)
    covered: np.ndarray = np.diff(until) / np.diff(edges)
    return covered


def _passed(moments: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The sum of how long before each edge the moments are that are before it."""
    counts = np.searchsorted(moments, edges)
    sums = np.concatenate(([0.0], np.cumsum(moments)))
    passed: np.ndarray = counts * edges - sums[counts]
    return passed


def _window(run: Run, meetings: Sequence[Meeting]) -> tuple[float, float]:
    """Microseconds from and to which single calls are shown: around the longest wait."""
    calls = sorted(run.calls, key=lambda call: call.start)
    if not calls:
        return 0.0, 1.0
    worst = max(meetings, key=lambda one: one.waited, default=None)
    center = calls[len(calls) // 2] if worst is None else worst.last
    own = sorted(run.ranks[center.rank].calls, key=lambda call: call.start)
    index = own.index(center)
    shown = own[max(0, index - CALLS_AROUND // 2) : index + CALLS_AROUND // 2 + 1]
    others = worst.calls if worst is not None else ()
    first = min([shown[0].start, *(call.start for call in others)])
    last = max(call.end for call in shown)
    margin = 0.02 * (last - first) or 1.0
    return max(0.0, first - margin), last + margin


def _part(axes: Any, run: Run, ranks: Sequence[int], start: float, end: float) -> None:
    """Each call as a bar in its operation's colour; what of it was waiting is pale."""
    scale, unit = (1e6, "seconds") if end - start > 2e6 else (1e3, "milliseconds")
    rows = {rank: row for row, rank in enumerate(ranks)}
    shown = [
        call for call in run.calls if call.rank in rows and call.end > start and call.start < end
    ]
    names = [name for name, _ in Counter(call.operation for call in shown).most_common()]
    colors = dict(zip(names, COLORS, strict=False))
    for name in names:
        color = colors.get(name, OTHERS_COLOR)
        for row in range(len(ranks)):
            calls = [call for call in shown if call.operation == name and rows[call.rank] == row]
            spans = [((c.start - start) / scale, (c.end - c.start) / scale) for c in calls]
            waits = [((c.start - start) / scale, c.waited / scale) for c in calls if c.waited]
            axes.broken_barh(spans, (row - 0.36, 0.72), color=color, linewidth=0.4, edgecolor="w")
            axes.broken_barh(waits, (row - 0.36, 0.72), color="w", linewidth=0, alpha=PALE)
    for name in [name for name in names if name in colors]:
        axes.barh(0, 0, color=colors[name], label=name)
    if len(names) > len(colors):
        axes.barh(0, 0, color=OTHERS_COLOR, label="others")
    axes.barh(0, 0, color=OTHERS_COLOR, alpha=1 - PALE, label="pale: waiting")
    axes.set_xlim(0, (end - start) / scale)
    axes.set_xlabel(f"{unit} after {start / 1e6:.6f} s", fontsize=9)
    axes.set_title("Calls around the longest wait", loc="left", fontweight="bold")
