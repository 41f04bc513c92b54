"""Time against bytes as a picture: a line for each case, and below it bytes a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from figures import plain_axes, saved_figure, size_axis
from peers import ALL_RANKS, BUNDLED, GLOO, HANDOFF, LINK, RAW
from report import number

from chainermn_tools.formatting import format_bytes

# Okabe and Ito's colours, which all eyes tell apart; ours in colour, peers dark, limits
# grey. On one node the last four of ours take the same ways: their lines lie on one
# another, so they get thinner, the later they are drawn.
STYLES: dict[str, dict[str, Any]] = {
    ALL_RANKS: {"color": "#9aa0a8", "ls": ":", "lw": 1.8},
    HANDOFF: {"color": "#7d838c", "ls": "--", "lw": 1.8},
    LINK: {"color": "#7d838c", "ls": "--", "lw": 1.8},
    GLOO: {"color": "#8c5a2b", "marker": "D", "ls": "-.", "lw": 1.4},
    RAW: {"color": "#5f5f5f", "marker": "v", "ls": "-.", "lw": 1.4},
    BUNDLED: {"color": "#000000", "marker": "s", "lw": 1.6},
    "naive": {"color": "#e69f00", "marker": "^", "lw": 1.6},
    "flat": {"color": "#cc79a7", "marker": "P", "lw": 1.6},
    "hierarchical": {"color": "#0072b2", "marker": "o", "lw": 4.5, "ms": 9},
    "two_dimensional": {"color": "#56b4e9", "marker": "o", "lw": 3, "ms": 6.5},
    "single_node": {"color": "#009e73", "marker": "o", "lw": 1.8, "ms": 4.5},
    "non_cuda_aware": {"color": "#d55e00", "marker": "o", "lw": 0.8, "ms": 2.5},
    "reproducible=True": {"color": "#7a3e9d", "marker": "x", "ls": ":", "lw": 1.6},
}
PANELS = "time, milliseconds", "bytes of the gradient a second, GB/s"


def draw(
    results: list[dict[str, Any]], limits: tuple[str, ...], heading: str, file: Path
) -> None:
    """Draw the medians into an image file.

    Args:
        results: what `report.of_sizes` says of each size.
        limits: cases that bound the others, the tightest first.
        heading: when, on what, and how.
        file: is overwritten.
    """
    sizes = [size["bytes"] for size in results]
    lines: dict[str, list[float]] = {}
    for size in results:
        for row in size["cases"]:
            lines.setdefault(row["name"], []).append(row["median_ms"])
    # Linear, for what differs little beside three orders of magnitude. A copy that
    # stays in a cache leaves the panel.
    fastest = max(
        nbytes / time / 1e6
        for nbytes, time in zip(sizes, lines[limits[0]], strict=True)
    )
    with saved_figure(file, heading, 2, figsize=(9, 10.5), sharex=True) as (_, panels):
        upper, lower = panels[:, 0]
        for name, ms in lines.items():
            style = {"ms": 5.5} | STYLES[name]
            upper.plot(sizes, ms, **style)
            rates = [
                nbytes / time / 1e6 for nbytes, time in zip(sizes, ms, strict=True)
            ]
            label = f"{name}{' (limit)' * (name in limits)}  {number(ms[-1])} ms"
            lower.plot(sizes, rates, label=label, **style)
        for axes, title in zip((upper, lower), PANELS, strict=True):
            axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
            size_axis(axes, sizes)
            plain_axes(axes, log_y=axes is upper)
        lower.set_ylim(0, 1.25 * fastest)
        lower.set_xlabel("gradients, one array of float32", fontsize=9)
        _legend(upper, lower, lines, sizes[-1])


def _legend(
    axes: Any, labelled: Any, lines: dict[str, list[float]], largest: int
) -> None:
    """In the order of the lines at the right edge, slowest first, as they lie there."""
    handles, labels = labelled.get_legend_handles_labels()
    order = sorted(range(len(handles)), key=lambda i: -lines[list(lines)[i]][-1])
    axes.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        title=f"and the time for {format_bytes(largest)}",
        fontsize=9,
        title_fontsize=9,
        alignment="left",
        frameon=False,
        loc="upper left",
    )
