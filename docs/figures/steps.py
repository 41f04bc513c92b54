"""Makes the picture of training steps, by each way to exchange gradients, from measurements.

    python benchmarks/step.py --rule Adam --json one.json
    python benchmarks/step.py --hosts --json hosts.json
    python docs/figures/steps.py one.json hosts.json

A bar is the time of a step over that of a step without exchange, with quartiles. Measure
while nothing else runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

PICTURE = Path(__file__).resolve().with_name("step.png")
ALONE = "no exchange"
# Ours in blue and green, PyTorch's in grey.
COLORS = {
    "synchronous": "#1f4e79",
    "overlapped": "#2e86c1",
    "double buffering": "#85c1e9",
    "sharded": "#1e8449",
    "PowerSGD": "#58d68d",
    "float16": "#a9dfbf",
    "DDP over gloo": "#555555",
    "DDP, ZeRO": "#888888",
    "DDP, PowerSGD": "#bbbbbb",
}


def draw(axes: Axes, models: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Draw a group of bars for each model; return the bars by way."""
    bars = {}
    for group, rows in enumerate(models.values()):
        ms = {row["name"]: np.array(row["ms"]) for row in rows}
        names = [name for name in COLORS if name in ms]
        width = 0.85 / len(names)
        for place, name in enumerate(names):
            ratios = ms[name] / ms[ALONE]
            low, middle, high = np.percentile(ratios, (25, 50, 75))
            bars[name] = axes.bar(
                group + (place - (len(names) - 1) / 2) * width,
                middle,
                width,
                yerr=[[middle - low], [high - middle]],
                color=COLORS[name],
                error_kw={"linewidth": 0.7},
            )
    labels = [name.replace(", ", ",\n") for name in models]
    axes.set_xticks(range(len(models)), labels)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("over a step without exchange")
    axes.spines[["top", "right"]].set_visible(False)
    return bars


def main() -> None:
    figure = Figure((9, 7), layout="constrained")
    panels = figure.subplots(2)
    legend: dict[str, Any] = {}
    for axes, file, title in zip(
        panels, sys.argv[1:], ("one machine", "two hosts"), strict=True
    ):
        found = json.loads(Path(file).read_text())
        legend |= draw(axes, found["models"])
        axes.set_title(f"{len(found['hosts'])} ranks, {title}", loc="left")
    names = [name for name in COLORS if name in legend]
    figure.legend(
        [legend[name] for name in names],
        names,
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )
    figure.savefig(PICTURE, dpi=90)
    with Image.open(PICTURE) as image:
        image.convert("RGB").quantize(64).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
