"""`chainermn launch`."""

from __future__ import annotations

import os
import sys

import click

from _chainermn_events import GRACE_SECONDS, GRACE_VARIABLE
from chainermn_tools import jobs
from chainermn_tools.cli import options
from chainermn_tools.launch import run_script


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-n", "ranks", type=click.IntRange(1), metavar="N", help="Number of ranks.")
@click.option("--hosts", "host_list", metavar="A,B", help="Hosts, also with ranks: a:2,b:2.")
@click.option("--hostfile", metavar="FILE", help="The same from a file, a host a line.")
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    metavar="R",
    help="How often to start again after a failure.",
)
@click.option(
    "--min-ranks",
    type=click.IntRange(1),
    metavar="M",
    help="Start again on the hosts that still answer, if they have M ranks.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0, min_open=True),
    default=GRACE_SECONDS,
    envvar=GRACE_VARIABLE,
    show_default=True,
    metavar="SECONDS",
    help="For the ranks to save and leave after SIGTERM or SIGUSR1.",
)
@click.option("--prefix", is_flag=True, help="Begin each line of output with its rank.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def launch(
    ctx: click.Context,
    ranks: int | None,
    host_list: str | None,
    hostfile: str | None,
    max_restarts: int,
    min_ranks: int | None,
    grace: float,
    prefix: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run a Python SCRIPT on several ranks, through mpiexec.

    \b
        chainermn launch -n 4 train.py --epoch 20

    It is a thin wrapper of the mpiexec that is on PATH, of MPICH or Open MPI or a relative, and
    prints the line that it runs.

    The job succeeds if mpiexec reports success and no rank fails. A rank fails by an error, by
    dying, or by os._exit. Otherwise the first rank that failed is shown, with its
    exit status and, of an exception, the traceback. With --max-restarts all ranks are then
    started anew, after a pause that grows; the script goes on from its last checkpoint, as with
    create_multi_node_checkpointer, and finds in CHAINERMN_RESTARTS how often it was. Ctrl-C ends
    everything. SIGTERM and SIGUSR1 reach the ranks as SIGTERM, to save and leave with status 75.

    OMP_NUM_THREADS is set to this host's cores divided by its ranks, unless it, or another
    BLAS's variable, is set already.

    Exit status: 0 if the job succeeds; else that of the rank that failed first (128 + n after
    signal n), 75 if all ranks have saved and left, 128 + n if this program was ended by signal n
    otherwise, and 2 if nothing could be started.
    """
    try:
        named = options.named_hosts(host_list, hostfile)
        if min_ranks is not None and not (named and max_restarts):
            raise ValueError("--min-ranks needs --max-restarts, and --hosts or --hostfile")
        if ranks is None and not named:
            raise ValueError("how many ranks? give -n, --hosts or --hostfile")
        hosts = jobs.assign_slots(named, ranks) if named else {}
        if not os.path.exists(script):
            raise ValueError(f"there is no {script}")
        launcher = jobs.find_mpiexec()
    except (ValueError, jobs.Unavailable) as error:
        raise click.UsageError(str(error)) from None
    ranks, args = ranks or sum(hosts.values()), [script, *arguments]
    result, _ = run_script(
        launcher,
        ranks,
        args,
        _log,
        hosts=hosts,
        prefix=prefix,
        max_restarts=max_restarts,
        min_ranks=min_ranks,
        grace=grace,
    )
    if not result.success:
        _log(result.message)
    ctx.exit(result.status)


def _log(text: str) -> None:
    sys.stdout.flush()
    click.echo(f"chainermn launch: {text}", err=True)
