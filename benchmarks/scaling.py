"""Tells how long a mean of gradients takes on up to 1,024 nodes, as `simulated.py` runs it.

    python benchmarks/scaling_hosts.py      measures what things cost here, over hosts
    python benchmarks/scaling.py            simulates with that; without it, with what is known

The network is one of --gigabits and --microseconds; what processors take is what was
measured. What was measured over hosts is simulated, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jobs
import numpy as np
from figures import COLORS, MARKS, plain_axes, saved_figure, size_axis
from jobs import RESULT
from limits import AT_MOST, judge
from report import limits_table
from rich.console import Console
from scaling_hosts import JSON
from simulated import (
    LINK_25G,
    Constants,
    bandwidth_limit,
    simulate,
    slowest,
    tree_latency,
)
from tables import make_table

from chainermn_tools.formatting import format_bytes

MODEL, SMALL = 102_228_128, 100_000  # bytes
NODES = (2, 4, 8, 16, 17, 32, 64, 128, 256, 512, 1024)
# Nodes and how much longer than its bytes a mean of MODEL may take; and a mean of SMALL
# on as many nodes than a binomial tree's latency there and back.
OVER_BYTES = ((2, 1.05), (16, 1.1), (128, 1.2), (1024, 1.5))
OVER_TREE = (1024, 2.5)
# And over hosts, one rank each, than MPI's own sum of the same bytes takes.
OVER_MPI = 1.0
# Communicator and ranks a node.
WAYS = (("flat", 1), ("hierarchical", 4), ("two_dimensional", 4))
SIZES = tuple(1 << power for power in range(14, 31, 2))
CHUNKS = tuple(1 << power for power in range(18, 28))


def arguments() -> argparse.Namespace:
    parser = jobs.parser(__doc__)
    parser.add_argument("--gigabits", type=float, default=25, help="a node's link (25)")
    parser.add_argument(
        "--microseconds", type=float, default=20, help="its latency (20)"
    )
    parser.add_argument("--measured", type=Path, default=JSON, metavar="FILE")
    parser.add_argument(
        "--json", type=Path, default=RESULT / "scaling.json", metavar="FILE"
    )
    parser.add_argument(
        "--plot", type=Path, default=RESULT / "scaling.png", metavar="FILE"
    )
    args = parser.parse_args()
    if args.gigabits <= 0 or args.microseconds < 0:
        parser.error("--gigabits must be more than 0, and --microseconds not less")
    return args


def main() -> int:
    args = arguments()
    measured = json.loads(args.measured.read_text()) if args.measured.exists() else {}
    here = Constants(**measured["constants"]) if measured else LINK_25G
    link = replace(
        here, bandwidth=args.gigabits * 1e9 / 8, latency=args.microseconds * 1e-6
    )
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(
        f"{args.gigabits:g} Gbit/s, {args.microseconds:g} us; {1e6 * link.message:.1f} us of the "
        f"processor for either end of a message, {link.memory / 1e9:.1f} GB/s of memory, "
        f"{1e6 * link.barrier:.0f} us for a barrier in a node"
        + ("" if measured else " (not measured here)")
    )
    rows = list(by_nodes(link))
    figures = [*limits(link), *measured_limits(measured)]
    console.print(nodes_table(rows))
    console.print(limits_table(figures))
    if measured:
        console.print(measured_table(measured, here))
    document = {"constants": asdict(link), "nodes": rows, "limits": figures}
    for name, values in {"sizes": by_size(link), "chunks": by_chunk(link)}.items():
        document[name] = list(values)
    document["links"] = list(by_link(link))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(document, indent=1))
    draw(document, args.plot)
    return 0 if all(one["ok"] for one in figures) else 1


def limits(link: Constants) -> Iterator[dict[str, Any]]:
    """Yield the figures that must be kept."""
    for nodes, most in OVER_BYTES:
        ratio = slowest("flat", nodes, MODEL, link) / bandwidth_limit(
            nodes, MODEL, link
        )
        name = f"{format_bytes(MODEL)} on {nodes} nodes, over its bytes' time"
        yield judge(name, AT_MOST, most, np.array([ratio]))
    nodes, most = OVER_TREE
    ratio = slowest("flat", nodes, SMALL, link) / tree_latency(nodes, link)
    name = (
        f"{format_bytes(SMALL)} on {nodes} nodes, over a binomial tree's latency, twice"
    )
    yield judge(name, AT_MOST, most, np.array([ratio]))


def measured_limits(measured: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the figures that must be kept of what `scaling_hosts.py` measured, in its rounds."""
    for hosts, cases in measured.get("means", {}).items():
        (mpi,) = (np.array(case["ms"]) for case in cases if case["kind"] != "ours")
        for case in cases:
            if case["kind"] == "ours":
                name = f"{hosts} hosts, {case['name']}: measured, over MPI_Allreduce"
                yield judge(name, AT_MOST, OVER_MPI, np.array(case["ms"]) / mpi)


def by_nodes(link: Constants) -> Iterator[dict[str, Any]]:
    """Yield the times of MODEL and what is sent for it, by communicator and number of nodes."""
    for name, ranks in WAYS:
        for nodes in NODES:
            counts = simulate(name, nodes, MODEL, link, ranks)
            yield {
                "name": name,
                "ranks": ranks,
                "nodes": nodes,
                "limit": bandwidth_limit(nodes, MODEL, link),
                **asdict(counts),
            }


def by_size(link: Constants) -> Iterator[dict[str, Any]]:
    for nodes in (4, 16, 128, 1024):
        for nbytes in SIZES:
            if nbytes >= 4 * nodes:
                seconds = simulate("flat", nodes, nbytes, link).seconds
                yield {"label": f"{nodes} nodes", "x": nbytes, "seconds": seconds}


def by_chunk(link: Constants) -> Iterator[dict[str, Any]]:
    for nodes in (16, 128, 1024):
        for chunk in CHUNKS:
            seconds = simulate("flat", nodes, MODEL, link, chunk_bytes=chunk).seconds
            yield {"label": f"{nodes} nodes", "x": chunk, "seconds": seconds}


def by_link(link: Constants) -> Iterator[dict[str, Any]]:
    """Yield the times of MODEL over those of its bytes, by latency and bandwidth."""
    for gigabits in (1, 10, 25, 100):
        for microseconds in (2, 5, 10, 20, 50, 100, 200):
            each = replace(
                link, bandwidth=gigabits * 1e9 / 8, latency=microseconds * 1e-6
            )
            seconds = simulate("flat", 128, MODEL, each).seconds
            ratio = seconds / bandwidth_limit(128, MODEL, each)
            yield {"label": f"{gigabits} Gbit/s", "x": microseconds, "ratio": ratio}


def nodes_table(rows: list[dict[str, Any]]) -> Any:
    """Return milliseconds, and times over the bytes' own, by number of nodes."""
    cells: dict[int, list[str]] = {}
    for row in rows:
        ratio = row["seconds"] / row["limit"]
        cells.setdefault(row["nodes"], []).append(
            f"{1e3 * row['seconds']:.1f} ({ratio:.3f})"
        )
    columns = [f"{name}, {ranks} a node" for name, ranks in WAYS]
    messages = {row["nodes"]: row["messages"] for row in rows if row["name"] == "flat"}
    table = [(str(n), *each, str(messages[n])) for n, each in cells.items()]
    title = f"Mean of {format_bytes(MODEL)}: ms, and times the limit of its bytes"
    return make_table("nodes", (*columns, "messages, flat"), table, title)


def measured_table(measured: dict[str, Any], here: Constants) -> Any:
    """Return what was measured over hosts beside what is simulated with the same link."""
    rows = []
    for hosts, cases in measured["means"].items():
        for case in cases:
            simulated = ""
            if case["kind"] == "ours":
                took = simulate(
                    case["name"], int(hosts), measured["bytes"], here
                ).seconds
                simulated = f"{1e3 * took:.0f}"
            over = f"{case['over_mpi'][1]:.3f}"
            rows.append(
                (
                    f"{hosts}: {case['name']}",
                    f"{case['median_ms']:.0f}",
                    over,
                    simulated,
                )
            )
    columns = ("measured ms", "over MPI_Allreduce", "simulated ms")
    return make_table(
        "hosts", columns, rows, f"Measured over hosts, {measured['rate']}"
    )


def draw(document: dict[str, Any], file: Path) -> None:
    """Draw time over nodes, sizes and chunks, and the ratio to the limit over latency."""
    link = document["constants"]
    title = (
        f"Simulated means of gradients: {8e-9 * link['bandwidth']:g} Gbit/s, "
        f"{1e6 * link['latency']:g} us, where not said otherwise"
    )
    with saved_figure(file, title, 2, 2, figsize=(11, 8)) as (_, panels):
        nodes = [
            {"label": f"{row['name']}, {row['ranks']} a node", "x": row["nodes"], **row}
            for row in document["nodes"]
        ]
        of_model = format_bytes(MODEL)
        for axes, rows, value, what in (
            (panels[0, 0], nodes, "seconds", f"{of_model}: seconds by nodes"),
            (panels[0, 1], document["sizes"], "seconds", "flat: seconds by bytes"),
            (
                panels[1, 0],
                document["chunks"],
                "seconds",
                f"{of_model}: seconds by chunk",
            ),
            (
                panels[1, 1],
                document["links"],
                "ratio",
                "128 nodes: over the limit, by latency, us",
            ),
        ):
            lines(axes, rows, value, log_y=rows is document["sizes"])
            axes.set_title(what, loc="left", fontsize=11, fontweight="bold")
        for axes, sizes in ((panels[0, 1], SIZES), (panels[1, 0], CHUNKS)):
            size_axis(axes, sizes)


def lines(axes: Any, rows: list[dict[str, Any]], value: str, log_y: bool) -> None:
    """Draw a line for each label."""
    for number, label in enumerate(dict.fromkeys(row["label"] for row in rows)):
        own = [row for row in rows if row["label"] == label]
        style = {
            "color": COLORS[number % len(COLORS)],
            "marker": MARKS[number % len(MARKS)],
        }
        x, y = [row["x"] for row in own], [row[value] for row in own]
        axes.plot(x, y, label=label, lw=1.6, ms=5, **style)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda number, _: f"{number:g}")
    plain_axes(axes, log_y)
    axes.legend(fontsize=8, frameon=False)


if __name__ == "__main__":
    sys.exit(main())
