"""`chainermn trace`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from chainermn_tools.cli import options


@click.command()
@click.argument("folder", metavar="DIR")
@click.option(
    "--run",
    "wanted",
    metavar="RUN",
    help="The name of a run. The default is the newest run.",
)
@click.option(
    "--output",
    metavar="FILE",
    help="Write the traces of all ranks into one file for Perfetto or Chrome.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def trace(
    folder: str,
    wanted: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Show what a traced job's communicators did, and who was late.

    If CHAINERMN_TRACE names a folder, each rank of a job writes a file RUN.rankN.json
    there. DIR is this folder, or the file of one rank:

    \b
        chainermn launch -n 4 --env CHAINERMN_TRACE=traces train.py
        chainermn trace traces --output merged.json

    In the tables, "communicator" is the communicator's name in the files, "number"
    counts its collective calls, "bytes" is the payload of all ranks, and "raised" counts
    the calls that ended with an exception. The last line names the rank that others wait
    for most. `chainermn report` draws the ranks' time lines.

    The ranks' clocks are aligned. A call is written when it ends, so a call in which a
    job hung or was killed is in no file. `chainermn stacks` shows such a call while the
    job runs.

    Exit status: 0; 2 if there is no trace, or a file can't be written.
    """
    from chainermn_tools import trace as traces
    from chainermn_tools.formatting import make_console, printable

    try:
        run = traces.read(Path(folder), wanted)
    except traces.NoTrace as error:
        raise click.UsageError(printable(str(error))) from None
    uncertainty = traces.align(run)
    collectives, incomplete = traces.match(run)
    summary = traces.summarize(run, collectives, incomplete, uncertainty)
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        traces.render(summary, make_console())
    if output is not None:
        options.save("--output", output, lambda: traces.write_chrome_trace(run, output))
