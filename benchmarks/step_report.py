"""Tables and plot of the times of training steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from figures import plain_axes, saved_figure
from rich.console import Console
from step_names import ALONE, BUNDLED, DDP, RAW, SYNCHRONOUS
from tables import make_table

# Columns that compare ways. A way's efficiency is the first's milliseconds over its
# own; so are those beside the floor and the bundled one, where more is better.
EFFICIENCIES = {"efficiency": ALONE, "/ floor": RAW, "/ bundled": BUNDLED}
# Here less is better: a way's milliseconds over the other's.
OVER = {"ms / sync.": SYNCHRONOUS, "ms / DDP": DDP}


def ratios(result: dict[str, Any], name: str, over: str) -> np.ndarray | None:
    """Return, for each round, a way's milliseconds over another's; None where one is missing."""
    times = {row["name"]: np.array(row["ms"]) for row in result["ways"]}
    return times[name] / times[over] if {name, over} <= times.keys() else None


def show(result: dict[str, Any]) -> None:
    """Print one model's table; ways that were not timed have no column."""
    names = {row["name"] for row in result["ways"]}
    pairs = {
        title: (other, True) for title, other in EFFICIENCIES.items() if other in names
    }
    pairs |= {title: (other, False) for title, other in OVER.items() if other in names}
    rows = []
    for row in result["ways"]:
        low, middle, high = np.percentile(row["ms"], (25, 50, 75))
        cells = [f"{middle:.3f}", f"{low:.3f} - {high:.3f}"]
        for other, inverted in pairs.values():
            found = ratios(
                result, *((other, row["name"]) if inverted else (row["name"], other))
            )
            cells.append("" if found is None else f"{np.median(found):.3f}")
        if not row["right"]:
            cells[0] = f"WRONG {cells[0]}"
        rows.append((row["name"], *cells))
    title = (
        f"{result['model']}: {'-'.join(map(str, result['widths']))}, batch {result['batch']}; "
        f"{result['rounds']} rounds, {result['disturbed']} disturbed"
    )
    console = Console(highlight=False)
    console.print(title)
    console.print(make_table("", ("ms", "quartiles", *pairs), rows))


def draw(document: dict[str, Any], file: Path) -> None:
    """Draw the efficiency of all ways and models, with quartiles."""
    models = document["models"]
    names = list(
        dict.fromkeys(row["name"] for model in models for row in model["ways"])
    )
    names.remove(ALONE)
    where = "two hosts" if document["hosts"] else "one machine"
    title = f"Training steps of {document['ranks']} ranks on {where}"
    file.parent.mkdir(parents=True, exist_ok=True)
    size = 2 + 2.2 * max(2, len(models)), 4.5
    with saved_figure(file, title, figsize=size) as (figure, panels):
        axes = panels[0, 0]
        width = 0.8 / max(1, len(names))
        for place, name in enumerate(names):
            bars = []
            for number, result in enumerate(models):
                found = ratios(result, ALONE, name)
                if found is not None:
                    bars.append(
                        (number + (place - (len(names) - 1) / 2) * width, found)
                    )
            quartiles = [np.percentile(found, (25, 50, 75)) for _, found in bars]
            low, middle, high = np.transpose(quartiles)
            error = [middle - low, high - middle]
            axes.bar(
                [x for x, _ in bars], middle, width, yerr=error, label=name, capsize=2
            )
        axes.set_xticks(
            range(len(models)), [_label(model["model"]) for model in models]
        )
        axes.set_ylabel("efficiency: step without exchange / step")
        axes.axhline(1, color="gray", linewidth=0.8)
        axes.set_ylim(0, 1.1)
        plain_axes(axes)
        axes.grid(visible=False, axis="x")
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)


def _label(model: str) -> str:
    return model.replace(", ", ",\n")
