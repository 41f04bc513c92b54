"""Prints the report as tables of a row for each operation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from chainermn_tools.bench.operations import BASELINES, MEAN_GRAD, OPERATIONS
from chainermn_tools.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_value,
    print_line,
    print_table,
)


def render(report: dict[str, Any], console: Console) -> None:
    """Print a report, as docs/bench.md describes it, for people."""
    print_line(title(report), console, "bold")
    arrays = "Arrays, the same way with every communicator; and what the machine does without it"
    for name, is_mean in (("Mean of gradients", True), (arrays, False)):
        rows = [
            row
            for row in report["results"]
            if (row["operation"] == MEAN_GRAD) == is_mean
        ]
        if rows:
            _print_rows(name, rows, console)
    console.print()
    for line, style in _footnotes(report):
        print_line(line, console, style)


def title(report: dict[str, Any]) -> str:
    """Return where it was measured, in a line."""
    hosts = list(dict.fromkeys(report["hosts"]))
    where = ", ".join(hosts[:4]) + (
        f" and {len(hosts) - 4} more" if len(hosts) > 4 else ""
    )
    ranks = format_count(report["ranks"], "rank")
    nodes = format_count(report["nodes"] or len(hosts), "node")
    return (
        f"{ranks} on {nodes} ({where}), {report['cores']} cores to use, {report['mpi']}"
    )


def label(row: dict[str, Any]) -> str:
    """Return an operation in a word or two."""
    if row["operation"] == MEAN_GRAD:
        return str(row["communicator"])
    return {**OPERATIONS, **BASELINES}[row["operation"]].title


def _print_rows(name: str, rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print two lines for each operation, its times and its bandwidths by size."""
    sizes = sorted({row["size"] for row in rows})
    cells = {(label(row), row["size"]): row for row in rows}
    lines = []
    for operation in dict.fromkeys(label(row) for row in rows):
        row = [cells.get((operation, size)) for size in sizes]
        lines += [(operation, *map(_time, row)), ("", *map(_bandwidth, row))]
    title = f"{name}: time, and bus bandwidth in GB/s"
    print_table(title, ("", *map(format_bytes, sizes)), lines, console, words=("",))


def _time(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    if not row["correct"]:
        return "FAILED" if "problem" in row else "WRONG"
    return format_duration(row["seconds"])


def _bandwidth(row: dict[str, Any] | None) -> str:
    return (
        ""
        if row is None or not row["correct"]
        else format_value("gb_per_second", row["busbw"])
    )


def _footnotes(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return what follows the tables: lines and their styles."""
    for row in (*report["checks"], *report["results"]):
        if not row["correct"]:
            who = row["communicator"] or "without a communicator"
            where = f" of {format_bytes(row['bytes'])}" if "bytes" in row else ""
            what = row.get("problem", "wrong values")
            yield f"{who}, {row['operation']}{where}: {what}", "bold red"
    for entry in report["skipped"]:
        if "communicator" in entry:
            yield f"skipped {entry['communicator']}: {entry['reason']}", "yellow"
    sizes = [entry for entry in report["skipped"] if "bytes" in entry]
    for reason, group in itertools.groupby(sizes, key=lambda entry: entry["reason"]):
        shown = [format_bytes(entry["bytes"]) for entry in group]
        what = shown[0] if len(shown) == 1 else f"{shown[0]} to {shown[-1]}"
        yield f"skipped {what}: {reason}", "yellow"
    if report["correct"]:
        checked = len(report["checks"]) + len(report["results"])
        yield f"All values of {checked} checks were right.", "green"
    else:
        yield "Not all is right." if report["results"] else "Nothing ran.", "bold red"
