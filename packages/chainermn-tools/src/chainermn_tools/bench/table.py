"""Prints the report: one table, errors, and skipped communicators."""

from __future__ import annotations

from rich.console import Console

from chainermn_tools.bench.runner import Report
from chainermn_tools.formatting import (
    format_bytes,
    format_duration,
    print_line,
    print_table,
)


def render(report: Report, console: Console) -> None:
    """Print a report, as docs/bench.md describes it, for people."""
    print_line(report.where, console, "bold")
    rows = []
    for title, times in report.times.items():
        cells = ["-"] * len(report.sizes)
        for number, size in enumerate(report.sizes):
            if size in times:
                cells[number] = format_duration(times[size])
        rows.append([title, *cells])
    if rows:
        columns = ["", *map(format_bytes, report.sizes)]
        print_table("Time of a call, by size", columns, rows, console, words=("",))
        console.print()
    for line in report.skipped:
        print_line(f"not measured: {line}", console, "yellow")
    for line in report.problems:
        print_line(line, console, "bold red")
    if report.correct:
        print_line("All values were right.", console, "green")
    elif report.problems:
        print_line("Not all values were right.", console, "bold red")
    else:
        print_line("Nothing was measured.", console, "bold red")
