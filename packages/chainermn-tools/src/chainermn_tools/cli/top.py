"""`chainermn top`."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import click
from rich.console import Console

from chainermn_tools import formatting

COLUMNS = {  # the table's columns, and the keys of a summary that they show
    "rank": "rank",
    "host": "host",
    "steps_per_second": "steps_per_second",
    "examples_per_second": "examples_per_second",
    "waiting_share": "waiting",
    "wire_share": "wire",
    "waited_for_share": "waited_for",
    "memory_bytes": "memory_bytes",
}
SORT_KEYS = [key for key in COLUMNS.values() if key != "host"]


@click.command()
@click.argument("job", type=click.IntRange(1), required=False)
@click.option(
    "--sort",
    type=click.Choice(SORT_KEYS),
    default="rank",
    help="The column to sort by, with the largest value first. The default is rank, which "
    "begins at 0.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON instead of a table, and end."
)
def top(job: int | None, sort: str, as_json: bool) -> None:
    """Show what each rank of a running job does now.

    The last line names the rank that others wait for most. On the job's first host the
    command shows all ranks, and on other hosts only the ranks there. JOB is the PID of
    `chainermn launch`, of mpiexec or of a rank on this host. You can omit JOB if only
    one job runs here. Jobs with one rank aren't shown. On a terminal the table is
    refreshed until Ctrl-C:

    \b
        chainermn top --sort waited_for
        chainermn top 4711 --json

    Percentages cover the last ten seconds, or the last two with --json or without a
    terminal. They say how long a rank waited for other ranks, how long it was on the
    wire, which is in a call that all ranks had begun, and how long other ranks waited for
    this rank. A step is one `update` of a multi-node optimizer. "examples/s" counts the
    examples of this rank alone.

    Exit status: 0; 1 if the job has ended or doesn't answer; 2 if there is no such job
    here.
    """
    from chainermn_tools import live

    console = formatting.make_console()
    with suppress(KeyboardInterrupt):
        for summary in live.summaries(live.choose(job), sort):
            if as_json:
                click.echo(json.dumps(summary))
                return
            console.clear()  # of a terminal
            _print(summary, console)
            if not console.is_terminal:
                return


def _print(summary: dict[str, Any], console: Console) -> None:
    title = f"Job {summary['job']}: {summary['command']}"
    formatting.print_records(title, list(map(_row, summary["ranks"])), console)
    for rank in summary["ranks"]:
        if rank["rank"] == summary["slowest"]:
            where = f"rank {rank['rank']} on {rank['host']}, process {rank['pid']}"
            formatting.print_line(f"slowest: {where}", console, "bold")
    for name in summary["unseen"]:
        formatting.print_line(f"not seen from here: {name}", console, "bold")
    # Only rank 0's host asks all other hosts.
    if summary["unseen"] and all(rank["rank"] for rank in summary["ranks"]):
        host = summary["unseen"][0].rpartition(" ")[2]
        line = f"only ranks of this host are shown; to see all, run it on {host}"
        formatting.print_line(line, console, "bold")


def _row(rank: dict[str, Any]) -> dict[str, Any]:
    from chainermn_tools import live

    row = {column: rank[key] for column, key in COLUMNS.items()}
    row["does"] = live.in_words(rank)
    return row
