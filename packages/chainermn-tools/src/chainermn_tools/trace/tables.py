"""Prints a run in tables: operations, ranks, and the longest waits."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from chainermn_tools.formatting import (
    format_count,
    format_duration,
    print_line,
    print_records,
)

TABLES = {  # the keys of a summary, and the titles of their tables
    "operations": "Operations, calls of all ranks together",
    "ranks": "Ranks, the one that others waited for longest first",
    "longest_waits": "Longest waits",
}


def render(summary: dict[str, Any], console: Console) -> None:
    """Print what `summarize` returned."""
    print_line(title(summary), console, "bold")
    for key, name in TABLES.items():
        print_records(name, summary[key], console)
    console.print()
    for warning in summary["warnings"]:
        print_line(warning, console, "yellow")
    print_line(summary["verdict"], console, "bold")


def title(summary: dict[str, Any]) -> str:
    """Return a line that says what ran where and for how long."""
    ranks = format_count(len(summary["ranks"]), "rank")
    hosts = format_count(len(summary["hosts"]), "host")
    calls = format_count(summary["calls"], "call")
    length = format_duration(summary["seconds"])
    clocks = "all share a clock"
    if error := summary["clock_error_seconds"]:
        clocks = f"clocks agree to within {format_duration(error)}"
    return f"Run {summary['run']}: {ranks} on {hosts}, {calls} in {length}; {clocks}"
