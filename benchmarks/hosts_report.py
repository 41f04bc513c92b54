"""What is said of the times over two hosts: limits, a table, JSON, a plot."""

from __future__ import annotations

import datetime
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import sizes_plot
from limits import AT_LEAST, AT_MOST, judge, quartiles
from peers import BUNDLED, LINK
from plot import COLORS
from report import cells, limits_table, machine, mpi_library, sizes_table
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

STREAMS = ("two_dimensional", "hierarchical")
# At least this part of what the link allows; float16 so many times as fast as float32; the
# whole call at most so many times its messages alone.
OF_THE_LINK, FLOAT16_FASTER, OVER_THE_WIRE = 0.90, 1.8, 1.06


def as_float16(name: str) -> str:
    """How a communicator with float16 on the wire is named."""
    return f"{name}, float16"


def alone(name: str) -> str:
    """How the messages of a communicator alone are named."""
    return f"{name}, only its messages"


def document(
    hosts: list[str], rate: str, model: str, floats: int, rounds: int, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """All that is written to JSON.

    Args:
        hosts: the host of each rank.
        rate: what each host may send.
        model, floats: its name and size.
        rounds: how often each contestant had its turn.
        rows: what `measure` returned.
    """
    ms = {row["name"]: np.array(row["ms"]) for row in rows}
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {
            "Python": platform.python_version(),
            "MPI": mpi_library(),
            "NumPy": version("numpy"),
            **{name: version(name) for name in ("mpi4py", "chainer", "chainermn-comm")},
        },
        "hosts": hosts,
        "rate": rate,
        "model": model,
        "floats": floats,
        "rounds": rounds,
        "megabits": round(float(np.median(floats * 32e-3 / ms[LINK])), 1),
        "contestants": [
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
    console.print(_times(results))
    console.print(limits_table(results["limits"]))
    print(f"{json_file}\n{plot_file}", flush=True)


def publish_sizes(results: dict[str, Any], json_file: Path, plot_file: Path) -> None:
    """Print the table of sizes, draw it, and write the JSON anew."""
    json_file.write_text(json.dumps(results, indent=1) + "\n")
    Console(highlight=False).print(sizes_table(results["sizes"]))
    sizes_file = plot_file.with_stem(f"{plot_file.stem}-sizes")
    sizes_plot.draw(results["sizes"], (LINK,), heading(results, "one array"), sizes_file)
    print(sizes_file, flush=True)


def heading(results: dict[str, Any], what: str | None = None) -> str:
    """When, on what, and how; of the model, or of ``what`` else is named."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    model = f"{results['model']} ({results['floats'] * 4e-6:.3g} MB)"
    return (
        f"allreduce_grad of {what or model}, ranks on "
        f"{', '.join(results['hosts'])}, {results['rate']} links: {results['megabits']:g} Mbit/s "
        f"each way, {results['rounds']} rounds, {results['date']}\n{versions}"
    )


def _times(results: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("milliseconds", no_wrap=True)
    for column in ("median", "min - max", "x link", "x bundled", "+ MB", "right"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in results["contestants"]:
        table.add_row(*cells(row, "over_link"))
    return table


def draw(results: dict[str, Any], file: Path) -> None:
    """Draw medians with quartiles and extremes into an image file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = results["contestants"]
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.3 * len(rows)), layout="constrained")
    figure.suptitle(heading(results), fontsize=8, x=0.01, ha="left", wrap=True)
    for y, row in enumerate(rows):
        low, first, third, high = np.percentile(row["ms"], (0, 25, 75, 100)) / 1e3
        color, median = COLORS[row["kind"]], row["median_ms"] / 1e3
        axes.plot([low, high], [y, y], color=color, lw=1)
        axes.plot([first, third], [y, y], color=color, lw=5, alpha=0.45, solid_capstyle="butt")
        axes.plot(median, y, "o", color=color, ms=7)
        if row["name"] == LINK:
            axes.axvline(median, color=color, ls=":", lw=1.2, zorder=0)
            axes.axvline(median / OF_THE_LINK, color=color, ls="--", lw=1.2, zorder=0)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds   ·   dotted: the link's limit; dashed: 90 % of it", fontsize=8)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row["kind"] == "ours" else "normal")
    right = axes.secondary_yaxis("right")
    times = [f"{row['median_ms'] / 1e3:.3f} s" + "  WRONG" * (not row["right"]) for row in rows]
    right.set_yticks(range(len(rows)), times, fontsize=9)
    right.tick_params(length=0)
    right.spines.right.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25)
    figure.savefig(file, dpi=130)
    plt.close(figure)
