"""`chainermn doctor`."""

from __future__ import annotations

import json
import os
import time

import click
from rich.console import Console

from chainermn_tools import doctor as diagnostics
from chainermn_tools import jobs
from chainermn_tools.cli import options
from chainermn_tools.cli.doctor_report import (
    as_dict,
    as_markdown,
    show_all,
    worst_status,
)

# Of the time-out, for starting and ending this program itself.
OWN_SECONDS = 2.0
# Of the time-out, what `chainermn env` may take in a report, and the most of it.
REPORT_SHARE, REPORT_SECONDS = 0.2, 20.0
STATUSES = {"ok": 0, "failed": 1, "warning": 3}


@click.command()
@click.option(
    "-n",
    "ranks",
    type=click.IntRange(1),
    metavar="N",
    help="Number of ranks that you want to run.",
)
@click.option(
    "--hosts", "host_list", metavar="A,B", help="Examine hosts too; also a:2,b:2."
)
@click.option("--hostfile", metavar="FILE", help="The same from a file, a host a line.")
@click.option(
    "--script", metavar="FILE", help="The script that is to run on the hosts."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option(
    "--report", "as_report", is_flag=True, help="Print text to paste into a bug report."
)
@click.option(
    "--timeout",
    type=options.Seconds(10, 86400),
    default=120,
    show_default=True,
    metavar="S",
    help="Seconds after which the doctor ends, whatever hangs.",
)
@click.pass_context
def doctor(
    ctx: click.Context,
    ranks: int | None,
    host_list: str | None,
    hostfile: str | None,
    script: str | None,
    as_json: bool,
    as_report: bool,
    timeout: float,
) -> None:
    """Find out what is wrong here, and how to mend it.

    The doctor first checks this machine, its MPI and its GPUs. Then it starts a few
    ranks here, and they try every communicator. With --hosts or --hostfile, or within a
    job of Slurm, it checks the hosts last:

    \b
        chainermn doctor -n 8
        chainermn doctor --hosts a:4,b:4 --script train.py

    Exit status: 0 if all is well, 1 if a check failed, 3 if there are warnings only, 2
    for a wrong command line, 128 + n if this program was ended by signal n.
    """
    started = time.monotonic()
    try:
        if jobs.rank_from_env() is not None:
            raise ValueError("the doctor starts ranks itself; run it without mpiexec")
        if as_json and as_report:
            raise ValueError("--json and --report exclude each other")
        # A check reads the file.
        hosts = options.named_hosts(host_list, hostfile, strict=False)
        if host_list is None and hostfile is None:
            _, hosts = jobs.find_allocation(os.environ) or ("", ())
            if script is not None and not hosts:
                raise ValueError(
                    "--script is looked for on hosts: name them with --hosts"
                )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    environment_time = min(REPORT_SECONDS, REPORT_SHARE * timeout) if as_report else 0.0
    deadline = started + timeout - OWN_SECONDS - environment_time
    path = None if script is None else os.path.abspath(script)
    context = diagnostics.Context(deadline, ranks, hosts, hostfile, path)
    stages = [diagnostics.LOCAL, diagnostics.RANKS]
    if hosts or hostfile is not None:
        stages.append(diagnostics.CLUSTER)
    with jobs.kill_children_on_exit():
        coming = diagnostics.run_checks(stages, context)
        if as_json or as_report:
            results = list(coming)
            seconds = time.monotonic() - started
            if as_json:
                click.echo(json.dumps(as_dict(results, context, seconds), indent=2))
            else:
                click.echo(as_markdown(stages, results, seconds, environment_time))
        else:
            results = show_all(stages, coming, Console())
    ctx.exit(STATUSES[worst_status(results)])
