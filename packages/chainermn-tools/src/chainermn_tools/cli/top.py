"""`chainermn top`."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import click
from rich.console import Console

SHARES = ("waiting", "wire", "waited_for")
RATES = ("steps_per_second", "examples_per_second")
COLUMNS = ("rank", "host", "steps/s", "examples/s", *SHARES, "memory", "does")
SORT_KEYS = ("rank", *SHARES, *RATES, "memory_bytes")


@click.command()
@click.argument("job", type=int, required=False)
@click.option(
    "--sort", type=click.Choice(SORT_KEYS), default="rank", help="The largest first."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, once.")
def top(job: int | None, sort: str, as_json: bool) -> None:
    """Look into a running job: what each rank does, and for which one others wait.

    Run it on a host of the job, the first one to see all ranks. JOB is the PID of
    mpiexec, or of a rank, on this host; without it, the only job here. A terminal's
    table is refreshed until Ctrl-C. Shares and rates are of ten seconds, steps calls of
    multi-node optimizers' `update`:

    \b
        chainermn top --sort waited_for
        chainermn top 4711 --json

    Exit status: 0; 1 when the job has ended or doesn't answer; 2 when no such job is
    seen here.
    """
    from chainermn_tools import live

    console = Console(highlight=False)
    with suppress(KeyboardInterrupt):
        for summary in live.summaries(live.choose(job), sort):
            if as_json:
                return click.echo(json.dumps(summary))
            console.clear()  # of a terminal
            _print(summary, console)
            if not console.is_terminal:
                return None


def _print(summary: dict[str, Any], console: Console) -> None:
    from chainermn_tools import formatting, live

    rows, lines = [], [f"not seen from here: {name}" for name in summary["unseen"]]
    for rank in summary["ranks"]:
        shares = (f"{rank[share]:.0%}" for share in SHARES)
        *rates, size = (
            formatting.format_value(it, rank[it]) for it in (*RATES, "memory_bytes")
        )
        rows.append(
            (
                str(rank["rank"]),
                rank["host"],
                *rates,
                *shares,
                size,
                live.in_words(rank),
            )
        )
        if rank["rank"] == summary["slowest"]:
            lines.insert(
                0, "slowest: rank {rank} on {host}, process {pid}".format_map(rank)
            )
    host = "".join(summary["unseen"][:1]).rpartition(" ")[2]
    # Rank 0's host asks all others.
    if host and all(rank["rank"] for rank in summary["ranks"]):
        lines.append(f"only ranks of this host are shown; to see all, run it on {host}")
    title = "Job {job}: {command}".format_map(summary)
    formatting.print_table(title, COLUMNS, rows, console, ("host", "does"))
    formatting.print_line("\n".join(lines), console, "bold")
