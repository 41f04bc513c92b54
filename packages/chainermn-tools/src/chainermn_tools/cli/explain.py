"""`chainermn explain`."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import click
from rich.console import Console

from chainermn_tools import explain as explaining


@click.command()
@click.argument("file", default="-")
@click.pass_context
def explain(ctx: click.Context, file: str) -> None:
    """Recognise known failures in a log, and say what to do about them.

    FILE is the log of a job; without it, or with "-", standard input is read:

    \b
        mpiexec -n 4 python train.py 2>&1 | tee log | chainermn explain

    Causes come first; what only says that something else failed comes last.

    Exit status: 0 when something was recognised, 1 when nothing was, 2 when FILE can't be read.
    """
    if file == "-" and sys.stdin.isatty():
        click.echo("Reading a log from the terminal; Ctrl-D ends it.", err=True)
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as log:
            found = explaining.search(log)
    except OSError as error:
        name = "standard input" if file == "-" else file
        raise click.UsageError(f"{name} can't be read: {error.strerror}") from None
    explaining.render(found, Console())
    if not found:
        ctx.exit(1)
