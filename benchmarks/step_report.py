"""Tables and plot of the times of training steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from step_ways import ALONE, BUNDLED, DDP, RAW, SYNCHRONOUS

from chainermn_tools.bench.text import make_table

# What a way's step is compared with, as a ratio of milliseconds; smaller is better.
OVER = (SYNCHRONOUS, DDP)


def ratios(result: dict[str, Any], name: str, over: str) -> np.ndarray | None:
    """Return, for each round, a way's milliseconds over another's; None where one is missing."""
    times = {row["name"]: np.array(row["ms"]) for row in result["ways"]}
    return times[name] / times[over] if {name, over} <= times.keys() else None


def show(result: dict[str, Any]) -> None:
    """Print one model's table."""
    rows = []
    for row in result["ways"]:
        low, middle, high = np.percentile(row["ms"], (25, 50, 75))
        cells = [f"{middle:.3f}", f"{low:.3f} - {high:.3f}"]
        against = ((ALONE, True), (RAW, True), (BUNDLED, True), (SYNCHRONOUS, False), (DDP, False))
        for other, inverted in against:
            found = ratios(result, *((other, row["name"]) if inverted else (row["name"], other)))
            cells.append("" if found is None else f"{np.median(found):.3f}")
        cells.append("" if row["right"] else "WRONG")
        rows.append((row["name"], *cells))
    columns = (
        *("ms", "quartiles", "efficiency", "/ floor", "/ bundled"),
        *("ms / sync.", "ms / DDP", ""),
    )
    title = (
        f"{result['model']}: {'-'.join(map(str, result['widths']))}, batch {result['batch']}; "
        f"{result['rounds']} rounds, {result['disturbed']} disturbed"
    )
    Console(highlight=False).print(make_table("", columns, rows, title))


def draw(document: dict[str, Any], file: Path) -> None:
    """Draw the efficiency of all ways and models, with quartiles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["name"] for m in document["models"] for row in m["ways"]))
    names.remove(ALONE)
    figure, axes = pyplot.subplots(figsize=(2 + 2.2 * len(document["models"]), 4.5))
    width = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        bars = []
        for number, result in enumerate(document["models"]):
            found = ratios(result, ALONE, name)
            if found is not None:
                bars.append((number + (place - len(names) / 2 + 0.5) * width, found))
        quartiles = np.array([np.percentile(found, (25, 50, 75)) for _, found in bars])
        middle = quartiles[:, 1]
        error = [middle - quartiles[:, 0], quartiles[:, 2] - middle]
        axes.bar([x for x, _ in bars], middle, width, yerr=error, label=name, capsize=2)
    axes.set_xticks(range(len(document["models"])), [m["model"] for m in document["models"]])
    axes.set_ylabel("efficiency: step without exchange / step")
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_ylim(0, 1.1)
    axes.legend(fontsize="small", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
