"""`chainermn explain`."""

from __future__ import annotations

import json
import sys
from typing import BinaryIO

import click

from chainermn_tools import explain as explaining
from chainermn_tools.formatting import make_console


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.argument("file", default="-")
@click.pass_context
def explain(ctx: click.Context, as_json: bool, file: str) -> None:
    """Find known errors in a job's log, and say what to do about them.

    FILE is the log. Without FILE, or with "-", the command reads standard input:

    \b
        mpiexec -n 4 python train.py 2>&1 | tee log | chainermn explain

    After `chainermn launch --log-dir logs`, name one file, such as logs/rank-1.log.

    The command prints known errors: first causes, then lines which only say that
    something else failed. If ChainerMN itself says in the log which rank failed first,
    or the log ends with a traceback, the command ends with this verdict and the next
    step.

    Exit status: 0 if anything was found; 1 if nothing was found; 2 if FILE can't be read.
    """
    name = file
    if file == "-":
        name = "standard input"
    try:
        with _opened(file) as log:
            findings = explaining.search(log)
    except IsADirectoryError:
        message = f"{name} is a folder; name one file: {name}/rank-1.log"
        raise click.UsageError(message) from None
    except OSError as error:
        raise click.UsageError(f"{name} can't be read: {error.strerror}") from None
    if as_json:
        click.echo(json.dumps(explaining.as_dict(findings), indent=2))
    else:
        explaining.render(findings, make_console())
    if not findings.verdict and not findings.matches:
        ctx.exit(1)


def _opened(file: str) -> BinaryIO:
    if file != "-":
        return open(file, "rb")
    if sys.stdin is None:
        raise click.UsageError("standard input is closed; name a file")
    if sys.stdin.isatty():
        click.echo("Reading a log from the terminal; Ctrl-D ends it.", err=True)
    return sys.stdin.buffer
