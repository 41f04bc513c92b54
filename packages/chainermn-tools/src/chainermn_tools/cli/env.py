"""`chainermn env`."""

from __future__ import annotations

import json

import click

from chainermn_tools import environment, jobs
from chainermn_tools.formatting import make_console


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def env(as_json: bool) -> None:
    """Print what a bug report needs: versions, MPI, machine, GPUs.

    Under mpiexec, rank 0 prints the report once, and adds where each rank runs:

    \b
        chainermn env --json
        mpiexec -n 4 chainermn env

    Exit status: 0, even if something can't be found out. The report then gives the
    reason.
    """
    with jobs.kill_children_on_exit():
        report = environment.collect()
    place = jobs.rank_from_env()
    if place is not None and place[0] != 0:
        return
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        # Open MPI gives each rank a terminal of its own, wherever mpiexec's output
        # goes.
        environment.render(
            report, make_console(force_terminal=False if place else None)
        )
