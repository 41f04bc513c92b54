"""Prints a run in tables: time per operation, ranks, and which of them were late."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console

from chainermn_tools.formatting import (
    format_bytes,
    format_count,
    format_duration,
    print_line,
    print_table,
)
from chainermn_tools.trace import summary
from chainermn_tools.trace.table import Run

MOST_RANKS, MOST_KINDS, MOST_CALLS = 32, 20, 10
# Columns that hold text; the others hold numbers.
WORDS = ("operation", "host", "communicator", "came last")


def render(
    run: Run, collectives: np.ndarray, incomplete: int, error: float, console: Console
) -> None:
    """Print a run, and what `match` returned of it; clocks may differ by ``error`` microseconds."""
    number = format_count(len(run.ranks), "rank")
    hosts = format_count(len({trace.host for trace in run.ranks.values()}), "host")
    calls = format_count(len(run.table), "call")
    length = format_duration(run.table["end"].max(initial=0.0) / 1e6)
    exact = f"clocks agree to within {format_duration(error / 1e6)}"
    clocks = exact if error else "all share a clock"
    title = f"Run {run.name}: {number} on {hosts}, {calls} in {length}; {clocks}"
    print_line(title, console, "bold")
    _operations(run, console)
    ranks = summary.by_rank(run, collectives)
    _ranks(ranks, console)
    _stragglers(run, collectives, console)
    console.print()
    if incomplete:
        lacking = format_count(incomplete, "collective call")
        run.warnings.append(f"{lacking} without all ranks, not counted above")
    for warning in run.warnings:
        print_line(warning, console, "yellow")
    print_line(_most_waited_for(ranks), console, "bold")


def _operations(run: Run, console: Console) -> None:
    columns = ("operation", "calls", "total", "median", "longest", "waiting", "bytes", "GB/s")
    cells, failed = [], []
    for row in summary.by_operation(run):
        speed = "-"
        if row.bandwidth is not None:
            speed = f"{row.bandwidth / 1e9:.3g}" if row.bandwidth >= 1e6 else "<0.001"
        times = (row.total, row.median, row.longest, row.waited)
        size = format_bytes(row.nbytes) if row.nbytes else "-"
        cells.append((row.operation, str(row.count), *map(format_duration, times), size, speed))
        if row.failed:
            failed.append(f"{row.operation} raised in {format_count(row.failed, 'call')}")
    print_table("Operations, calls of all ranks together", columns, cells, console, WORDS)
    for line in failed:
        print_line(line, console, "yellow")


def _ranks(rows: Sequence[summary.RankSummary], console: Console) -> None:
    columns = ("rank", "host", "calls", "in calls", "waiting", "others waited", "came last")
    cells = []
    # Of many, those that matter: the ones that others waited for.
    shown = sorted(sorted(rows, key=lambda one: -one.kept)[:MOST_RANKS], key=lambda one: one.rank)
    for row in shown:
        times = (format_duration(seconds) for seconds in (row.total, row.waited, row.kept))
        cells.append((str(row.rank), row.host, str(row.calls), *times, str(row.last)))
    print_table("Ranks", columns, cells, console, WORDS)
    if len(rows) > len(shown):
        print_line(f"and {len(rows) - len(shown)} ranks for which others waited less", console)


def _stragglers(run: Run, collectives: np.ndarray, console: Console) -> None:
    if not len(collectives):
        return
    columns = ("operation", "communicator", "calls", "rank", "came last", "others waited", "of")
    cells = []
    kinds = summary.straggler_stats(run, collectives)
    for row in kinds[:MOST_KINDS]:
        share = f"{row.times} ({row.times / row.count:.0%})"
        times = format_duration(row.kept), format_duration(row.waited)
        who = (row.operation, row.communicator, str(row.count), str(row.rank))
        cells.append((*who, share, *times))
    title = "Late ranks, by kind of collective call"
    print_table(title, columns, cells, console, WORDS)
    if (more := len(kinds) - MOST_KINDS) > 0:
        print_line(f"and {format_count(more, 'kind')} with less waiting", console)
    headings = ("at", "operation", "communicator", "number", "came last", "others waited")
    longest = np.argsort(-collectives["waited"], kind="stable")[:MOST_CALLS]
    calls = [
        (
            f"{call['start'] / 1e6:.6f} s",
            run.names[call["operation"]],
            run.names[call["communicator"]],
            str(call["sequence"]),
            f"rank {call['last']}",
            format_duration(float(call["waited"]) / 1e6),
        )
        for call in collectives[longest]
    ]
    print_table("Longest waits", headings, calls, console, WORDS)


def _most_waited_for(rows: Sequence[summary.RankSummary]) -> str:
    total = sum(row.kept for row in rows)
    row = max(rows, key=lambda one: one.kept)
    if not total:
        return "No rank was waited for."
    return (
        f"Others wait most for rank {row.rank} on {row.host}: {format_duration(row.kept)} of "
        f"{format_duration(total)} of all waiting"
    )
