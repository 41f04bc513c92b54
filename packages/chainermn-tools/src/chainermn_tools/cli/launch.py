"""`chainermn launch`."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from chainermn_tools import jobs
from chainermn_tools.launch import job, verdict
from chainermn_tools.launch.records import with_plain_ranks


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
    prefix: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run a Python SCRIPT on several ranks, through mpiexec.

    It is a thin wrapper of the mpiexec that is on PATH, of MPICH or Open MPI or a relative, and
    prints the line that it runs.

    The job is good only if every rank came to the script's end and said goodbye after
    MPI_Finalize. Otherwise the first rank that failed is shown, with its traceback and exit
    status. With --max-restarts all ranks are then started anew; the script goes on from its
    last checkpoint, as with create_multi_node_checkpointer. Ctrl-C ends everything.

    OMP_NUM_THREADS is set to this host's cores divided by its ranks, unless it, or another
    BLAS's variable, is set already.

    Exit status: 0 for a good job; else that of the rank that failed first (128 + n after
    signal n), 128 + n if this program was ended by signal n, and 2 if nothing could be started.
    """
    try:
        dealt = _dealt(ranks, host_list, hostfile)
        if not os.path.exists(script):
            raise ValueError(f"there is no {script}")
        mpiexec = jobs.find_mpiexec()
    except ValueError as problem:
        raise click.UsageError(str(problem)) from None
    number = sum(dealt.values()) if ranks is None else ranks
    threads = jobs.threads_per_rank(number, dealt)
    chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    environment = {**os.environ, **chosen}
    args = jobs.mpiexec_command(
        mpiexec,
        number,
        jobs.rank_command(script, *arguments),
        hosts=dealt,
        prefix=prefix,
        threads=threads,
        variables=environment,
    )
    _say(" ".join([*(f"{name}={value}" for name, value in chosen.items()), shlex.join(args)]))
    ctx.exit(_run(args, environment, number, max_restarts, prefix))


def _run(
    words: list[str], environment: Mapping[str, str], ranks: int, restarts: int, prefix: bool
) -> int:
    """Run the job until it is good or may not start again; the exit status."""
    change = with_plain_ranks if prefix else bytes
    with job.noting_signals() as signals:
        for attempt in range(restarts + 1):
            if attempt:
                _say(f"starting again, {attempt} of {restarts}")
            fresh = {**environment, jobs.JOB_VARIABLE: secrets.token_hex(8)}
            try:
                outcome = job.run(words, fresh, signals, change)
            except FileNotFoundError as problem:  # a script's interpreter, too, may be missing
                _say(f"mpiexec doesn't start: {problem}")
                return 2
            if outcome.tail and not outcome.tail.endswith(b"\n"):
                click.echo(err=True)
            if outcome.interrupted is not None:
                _say(f"ended by signal {outcome.interrupted}")
                return 128 + outcome.interrupted
            found = verdict.judge(outcome, ranks)
            if found.good:
                return 0
            _say(found.text)
            if not found.again:
                return found.status
    return found.status


def _dealt(ranks: int | None, host_list: str | None, hostfile: str | None) -> dict[str, int]:
    """How many ranks each host gets; empty for this one alone.

    Raises:
        ValueError: the options don't fit each other, or name no hosts.
    """
    if host_list is not None and hostfile is not None:
        raise ValueError("--hosts and --hostfile exclude each other")
    if host_list is not None:
        return jobs.assign_slots(jobs.parse_host_list(host_list), ranks)
    if hostfile is not None:
        try:
            text = Path(hostfile).read_text()
        except (OSError, UnicodeDecodeError) as problem:
            raise ValueError(f"the hostfile {hostfile} can't be read: {problem}") from None
        return jobs.assign_slots(jobs.parse_hostfile(text, hostfile), ranks)
    if ranks is None:
        raise ValueError("how many ranks? give -n, --hosts or --hostfile")
    return {}


def _say(text: str) -> None:
    sys.stdout.flush()
    click.echo(f"chainermn launch: {text}", err=True)
