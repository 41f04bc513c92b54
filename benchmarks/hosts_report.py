"""What is said of the times over two hosts: limits, a table, JSON, a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import sizes_plot
from figures import saved_figure
from limits import AT_LEAST, AT_MOST, judge, quartiles
from peers import BUNDLED, LINK
from plot import COLORS, draw_rows
from report import environment, limits_table, sizes_table, times_table
from rich.console import Console

STREAMS = ("two_dimensional", "hierarchical")
# At least this part of what the link allows; float16 so many times as fast as float32;
# the whole call at most so many times its messages alone.
OF_THE_LINK, FLOAT16_FASTER, OVER_THE_WIRE = 0.90, 1.8, 1.06


def as_float16(name: str) -> str:
    """How a communicator with float16 on the wire is named."""
    return f"{name}, float16"


def alone(name: str) -> str:
    """How the messages of a communicator alone are named."""
    return f"{name}, only its messages"


def document(
    hosts: list[str],
    rate: str,
    model: str,
    floats: int,
    rounds: int,
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    """All that is written to JSON.

    Args:
        hosts: the host of each rank.
        rate: what each host may send.
        model, floats: its name and size.
        rounds: how often each case had its turn.
        rows: what `measure` returned.
    """
    ms = {row["name"]: np.array(row["ms"]) for row in rows}
    return {
        **environment(),
        "hosts": hosts,
        "rate": rate,
        "model": model,
        "floats": floats,
        "rounds": rounds,
        "megabits": round(float(np.median(floats * 32e-3 / ms[LINK])), 1),
        "cases": [
            {
                **row,
                "median_ms": float(np.median(ms[row["name"]])),
                "over_link": quartiles(ms[row["name"]] / ms[LINK]),
                "over_bundled": quartiles(ms[row["name"]] / ms[BUNDLED]),
            }
            for row in rows
        ],
        "limits": [limit for name in STREAMS for limit in limits(name, ms)],
    }


def limits(name: str, ms: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """What a communicator must reach, and what it did."""
    of_link, faster = ms[LINK] / ms[name], ms[name] / ms[as_float16(name)]
    over = ms[name] / ms[alone(name)]
    return [
        judge(f"{name}: part of the link's limit", AT_LEAST, OF_THE_LINK, of_link),
        judge(f"{name}: float16 faster than float32", AT_LEAST, FLOAT16_FASTER, faster),
        judge(f"{name}: whole call over its messages", AT_MOST, OVER_THE_WIRE, over),
    ]


def publish(results: dict[str, Any], json_file: Path, plot_file: Path) -> None:
    """Print the tables and write the two files, whose folders are made."""
    for file in (json_file, plot_file):
        file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(results, indent=1) + "\n")
    draw(results, plot_file)
    console = Console(highlight=False)
    console.print(heading(results), soft_wrap=True)
    console.print(times_table(results["cases"], "over_link", "link"))
    console.print(limits_table(results["limits"]))
    print(f"{json_file}\n{plot_file}", flush=True)


def publish_sizes(results: dict[str, Any], json_file: Path, plot_file: Path) -> None:
    """Print the table of sizes, draw it, and write the JSON anew."""
    json_file.write_text(json.dumps(results, indent=1) + "\n")
    Console(highlight=False).print(sizes_table(results["sizes"]))
    sizes_file = plot_file.with_stem(f"{plot_file.stem}-sizes")
    sizes_plot.draw(
        results["sizes"], (LINK,), heading(results, "one array"), sizes_file
    )
    print(sizes_file, flush=True)


def heading(results: dict[str, Any], what: str | None = None) -> str:
    """When, on what, and how; of the model, or of ``what`` else is named."""
    versions = ", ".join(
        f"{name} {number}" for name, number in results["versions"].items()
    )
    model = f"{results['model']} ({results['floats'] * 4e-6:.3g} MB)"
    return (
        f"allreduce_grad of {what or model}, ranks on "
        f"{', '.join(results['hosts'])}, {results['rate']} links: {results['megabits']:g} Mbit/s "
        f"each way, {results['rounds']} rounds, {results['date']}\n{versions}"
    )


def draw(results: dict[str, Any], file: Path) -> None:
    """Draw medians with quartiles and extremes into an image file."""
    rows = results["cases"]
    limit = next(row["median_ms"] for row in rows if row["name"] == LINK) / 1e3
    size = 9, 1.5 + 0.3 * len(rows)
    with saved_figure(file, heading(results), figsize=size) as (_, ((axes,),)):
        draw_rows(axes, rows, lambda row: f"{row['median_ms'] / 1e3:.3f} s", scale=1e-3)
        axes.axvline(limit, color=COLORS["copy"], ls=":", lw=1.2, zorder=0)
        axes.axvline(
            limit / OF_THE_LINK, color=COLORS["copy"], ls="--", lw=1.2, zorder=0
        )
        axes.set_xlim(left=0)
        axes.set_xlabel(
            "seconds   ·   dotted: the link's limit; dashed: 90 % of it", fontsize=8
        )
