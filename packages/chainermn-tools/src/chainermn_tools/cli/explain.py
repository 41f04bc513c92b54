"""`chainermn explain`."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext

import click
from rich.console import Console

from chainermn_tools import explain as explaining


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.argument("file", default="-")
@click.pass_context
def explain(ctx: click.Context, as_json: bool, file: str) -> None:
    """Recognise known failures in a log, and say what to do about them.

    FILE is the log of a job; without it, or with "-", standard input is read:

    \b
        mpiexec -n 4 python train.py 2>&1 | tee log | chainermn explain

    First comes which rank failed first, how, and what to do, where the log says so.
    Then come known failures, causes first; what only says that something else failed
    comes last.

    Exit status: 0 when something was recognised, 1 when nothing was, 2 when FILE can't
    be read.
    """
    if file == "-" and sys.stdin.isatty():
        click.echo("Reading a log from the terminal; Ctrl-D ends it.", err=True)
    finder = explaining.VerdictFinder()
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as log:
            found = explaining.search(log, finder=finder)
    except OSError as error:
        name = "standard input" if file == "-" else file
        raise click.UsageError(f"{name} can't be read: {error.strerror}") from None
    verdict = finder.verdict()
    if as_json:
        click.echo(json.dumps(explaining.as_dict(found, verdict), indent=2))
    else:
        explaining.render(found, verdict, Console())
    if not (found or verdict):
        ctx.exit(1)
