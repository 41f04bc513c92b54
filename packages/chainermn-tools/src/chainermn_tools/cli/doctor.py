"""`chainermn doctor`."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import click

from chainermn_tools import doctor as diagnostics
from chainermn_tools import jobs
from chainermn_tools.cli import doctor_report, options

# The seconds of the time-out in which this program itself starts and ends.
OWN_SECONDS = 2.0
SHOW = {  # by whether --json and --report are given
    (False, False): doctor_report.show_text,
    (True, False): doctor_report.show_json,
    (False, True): doctor_report.show_markdown,
}
STATUSES = {"ok": 0, "failed": 1, "warning": 3}


@click.command()
@click.option(
    "-n",
    "ranks",
    type=click.IntRange(1),
    metavar="N",
    help="The number of ranks that you want to run. By default it is the number of the "
    "hosts' slots, or 2 without hosts.",
)
@click.option(
    "--hosts",
    "host_list",
    metavar="A,B",
    help="Check these hosts, too. Each host can have a number of ranks: a:2,b:2.",
)
@click.option(
    "--hostfile", metavar="FILE", help="Read the hosts from a file, one host per line."
)
@click.option(
    "--script",
    metavar="FILE",
    help="A script that all hosts must have, with the same content at the same path.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option(
    "--report",
    "as_report",
    is_flag=True,
    help="Print text to paste into a bug report.",
)
@click.option(
    "--timeout",
    type=click.IntRange(10),
    default=120,
    metavar="S",
    help="The doctor ends after this number of seconds, 120 by default, even if a check "
    "hangs.",
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
    timeout: int,
) -> None:
    """Find out what is wrong here, and how to fix it.

    The doctor first checks this machine, its MPI and its GPUs. Then it starts a few
    ranks here, and they try every communicator. With --hosts or --hostfile, or within a
    job of Slurm, it checks the hosts last:

    \b
        chainermn doctor -n 8
        chainermn doctor --hosts a:4,b:4 --script train.py

    Exit status: 0 if every check succeeded; 1 if a check failed; 2 for a wrong command
    line; 3 if there are only warnings; 128 + n if signal n ended this program.
    """
    deadline = time.monotonic() + timeout - OWN_SECONDS
    options.refuse_in_a_rank()
    if as_json and as_report:
        raise click.UsageError("--json and --report exclude each other")
    try:
        hosts = options.named_hosts(host_list, hostfile)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not hosts:
        with suppress(ValueError):  # a check reports the error
            _, hosts = jobs.find_allocation(os.environ) or ("", ())
    if script is not None:
        script = os.path.abspath(script)
        if not hosts:
            raise click.UsageError("--script needs hosts: name them with --hosts")
    context = diagnostics.Context(deadline, ranks, hosts, script)
    stages = [diagnostics.LOCAL, diagnostics.RANKS]
    if hosts:
        stages.append(diagnostics.HOSTS)
    with jobs.kill_children_on_exit():
        coming = diagnostics.run_checks(stages, context)
        results = SHOW[as_json, as_report](stages, coming, context)
    ctx.exit(STATUSES[doctor_report.worst_status(results)])
