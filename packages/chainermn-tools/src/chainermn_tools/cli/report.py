"""`chainermn report`."""

from __future__ import annotations

import socket
from pathlib import Path

import click

from chainermn_tools import environment, jobs
from chainermn_tools.cli import options
from chainermn_tools.formatting import printable


@click.command()
@click.argument("results", metavar="RESULT...", nargs=-1, required=True)
@click.option(
    "--output",
    metavar="FILE",
    default="report.html",
    help="The page to write, report.html by default.",
)
def report(results: tuple[str, ...], output: str) -> None:
    """Draw a job as a web page: curves, time lines, environment.

    A RESULT is a folder or a file. From a folder, the page shows the file "log", which
    the trainer's LogReport writes, the file "env.json", and a trace, which may be one
    folder deeper. Without "env.json" the page shows the environment of this machine:

    \b
        chainermn env --json > result/env.json
        chainermn launch -n 4 --env CHAINERMN_TRACE=result/trace train.py
        chainermn report result

    The page needs no network. It says which files are missing or damaged.

    Exit status: 0; 2 if there is nothing to show, or the page can't be written.
    """
    from chainermn_tools import report as reports

    try:
        found = reports.find([Path(result) for result in results])
    except reports.NoReport as error:
        raise click.UsageError(printable(str(error))) from None
    if found.environment is None:
        with jobs.kill_children_on_exit():
            found.environment = environment.collect()
        found.environment_of = f"{socket.gethostname()}, where this page was made"
    options.save(
        "--output", output, lambda: reports.write(output, " ".join(results), found)
    )
