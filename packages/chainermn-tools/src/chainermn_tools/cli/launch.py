"""`chainermn launch`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
from typing import Any

import click

from _chainermn_events import GRACE_SECONDS, GRACE_VARIABLE
from chainermn_tools import jobs
from chainermn_tools.cli import options
from chainermn_tools.explain import LABEL
from chainermn_tools.launch import run_script
from chainermn_tools.rank import LOG_VARIABLE


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "ranks",
    type=click.IntRange(1),
    metavar="N",
    help="The number of ranks. By default it follows from --hosts, or from the scheduler's "
    "job.",
)
@click.option(
    "--hosts",
    "host_list",
    metavar="A,B",
    help="The hosts, which can have numbers of ranks: a:2,b:2. Hosts without numbers "
    "share the ranks of -n evenly. Without -n each host has 1 rank.",
)
@click.option(
    "--hostfile",
    metavar="FILE",
    help="Read the hosts from a file, one host per line.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    metavar="R",
    help="Start the job again after a failure, at most R times.",
)
@click.option(
    "--min-ranks",
    type=click.IntRange(1),
    metavar="M",
    help="With --max-restarts and --hosts: start the job again on the hosts that answer, "
    "if they have room for at least M ranks.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0, min_open=True),
    default=GRACE_SECONDS,
    envvar=GRACE_VARIABLE,
    metavar="SECONDS",
    help="The time that ranks have to save and leave after SIGTERM or SIGUSR1, "
    f"{GRACE_SECONDS:g} seconds by default.",
)
@click.option("--prefix", is_flag=True, help="Begin each line of output with its rank.")
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False),
    help="Append the output of rank N to the file rank-N.log in this folder, and print "
    "none of it here. --prefix then has no effect.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="End the job after this time, with exit status 124.",
)
@click.option(
    "--env",
    "given",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a variable for the ranks on all hosts.",
)
@click.option(
    "--mpiexec",
    default="mpiexec",
    metavar="PATH",
    help="The mpiexec to use instead of the one on PATH.",
)
@click.option("--dry-run", is_flag=True, help="Only print the command line.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the result as JSON, as described above.",
)
@click.option(
    "-m", "is_module", is_flag=True, help="SCRIPT is a module, as for python -m."
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def launch(
    ctx: click.Context,
    /,
    ranks: int | None,
    host_list: str | None,
    hostfile: str | None,
    min_ranks: int | None,
    log_dir: str | None,
    given: tuple[str, ...],
    mpiexec: str,
    as_json: bool,
    is_module: bool,
    script: str,
    arguments: tuple[str, ...],
    **how: Any,
) -> None:
    """Run a Python SCRIPT on several ranks, through mpiexec.

    \b
        chainermn launch -n 4 train.py --epoch 20
        chainermn launch --hosts a:2,b:2 --log-dir logs -m package.train
        chainermn launch -n 4 --env PYTHONWARNINGS=error train.py
        chainermn launch -n 4 --env CHAINERMN_TIMEOUT=600 train.py

    CHAINERMN_TIMEOUT=600 is for a job that hangs: if a call waits for 600 seconds, every
    rank's stack is shown, and the job ends.

    The command prints the mpiexec command line that it runs. It refuses to start a job
    within a rank of another job. The script gets all ARGUMENTS.

    In a job of Slurm, PBS or LSF, the job's hosts are used unless you name others. PBS
    and LSF were never tried. Without -n there are as many ranks as the job has tasks,
    or one per node. The mpiexec on PATH must be of MPICH, of Open MPI, or of an MPI
    that derives from MPICH.

    The job succeeds if mpiexec reports success and no rank fails. A rank fails by an
    exception, by sys.exit with a status other than 0, by dying, or by os._exit. The
    first rank that failed is shown, with its exit status and traceback. With
    --max-restarts all ranks are then started again, after a pause that doubles each
    time. CHAINERMN_RESTARTS tells the script how often this has happened;
    create_multi_node_checkpointer loads the last checkpoint.

    Rank 0 reads what you type, unless the command runs in the background. Ctrl-C ends
    all ranks. SIGTERM and SIGUSR1 reach the ranks as SIGTERM, so that
    create_multi_node_checkpointer can save on all of them and leave.

    OMP_NUM_THREADS is set to a host's number of cores divided by its number of ranks,
    unless OMP_NUM_THREADS or the variable of another BLAS is set.

    With --json all output of ranks goes to standard error. Standard output gets one
    object with the status, the rank, the cause and the next step.

    Processes that ranks have left running are ended with the job.

    Exit status: 0 if the job succeeds; 2 if no rank starts; 75 if
    create_multi_node_checkpointer has saved on all ranks, and they have left; 124 after
    --timeout, or after CHAINERMN_TIMEOUT, the watchdog's limit; 130 after Ctrl-C; 128 + n
    after another signal n to this program. Otherwise it is the status of the rank that
    failed first: 1 after an exception or sys.exit(75), 128 + n after signal n.
    """
    words = [script, *arguments]
    if is_module:
        words.insert(0, "-m")
    options.refuse_in_a_rank()
    try:
        named = options.named_hosts(host_list, hostfile)
        if min_ranks is not None and not (named and how["max_restarts"]):
            raise ValueError(
                "--min-ranks needs --max-restarts, and --hosts or --hostfile"
            )
        named = named or _allocated(ranks)
        if named:
            how["hosts"] = jobs.assign_slots(named, ranks)
            ranks = sum(how["hosts"].values())
        if not is_module:
            _check_script(script, ranks or "N")
        if ranks is None:
            raise ValueError("how many ranks? give -n, --hosts or --hostfile")
        variables = {}
        for each in given:
            name, equals, variables[name] = each.partition("=")
            if not equals or not name.isidentifier():
                raise ValueError(f"--env {each}: write NAME=VALUE")
        if log_dir is not None:
            variables[LOG_VARIABLE] = os.path.abspath(log_dir)
            if not (named or how["dry_run"]):  # another host may have other folders
                os.makedirs(log_dir, exist_ok=True)
        launcher = jobs.find_mpiexec(mpiexec)
    except (ValueError, jobs.Unavailable) as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.UsageError(f"{error.filename}: {error.strerror}") from None
    how.update(min_ranks=min_ranks, variables=variables)
    with contextlib.ExitStack() as stack:
        if as_json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        result, output = run_script(launcher, ranks, words, _log, **how)
    if not result.success:
        _log(result.message, result.traceback)
    if as_json:
        found = dataclasses.asdict(result)
        found["next_step"] = result.next_step.strip().removeprefix(LABEL)
        found.update(hosts=how.get("hosts", {}))
        found.update(command=output.command, restarts=output.restarts)
        click.echo(json.dumps(found, indent=2))
    ctx.exit(result.status)


def _allocated(ranks: int | None) -> tuple[jobs.Host, ...]:
    """Return the hosts of a scheduler's job for this number of ranks; none outside of a job."""
    _, hosts = jobs.find_allocation(os.environ) or (None, ())
    if ranks is not None and ranks > sum(host.slots or 1 for host in hosts):
        # More ranks than were planned: the hosts share them.
        return tuple(jobs.Host(host.name, None) for host in hosts)
    return hosts


def _check_script(path: str, ranks: object) -> None:
    """Raise ValueError, or OSError, if a path is no Python script's."""
    problem = ""
    if not os.path.exists(path):
        problem = f"there is no {path!r} in {os.getcwd()}"
    elif os.path.isdir(path):
        if not os.path.exists(f"{path}/__main__.py"):
            problem = f"the folder {path} has no __main__.py"
    else:
        with open(path, "rb") as file:
            begin = file.read(100)
        if re.match(rb"\x7fELF|#!.*sh\s", begin):
            problem = (
                f"{path} is no Python script; to run a program: mpiexec -n {ranks} "
                f"{path}"
            )
    if problem and re.fullmatch(r"python[\d.]*", os.path.basename(path)):
        problem = f"give only the script: chainermn launch -n {ranks} x.py"
    if problem:
        raise ValueError(problem)


def _log(text: str, before: str = "") -> None:
    sys.stdout.flush()
    click.echo(f"{before}chainermn launch: {text}", err=True)
