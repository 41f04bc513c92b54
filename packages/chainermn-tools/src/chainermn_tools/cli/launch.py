"""`chainermn launch`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from _chainermn_events import GRACE_SECONDS, GRACE_VARIABLE, RESTARTS_VARIABLE
from chainermn_tools import environment, jobs
from chainermn_tools.cli import options
from chainermn_tools.explain import next_step
from chainermn_tools.launch import run_script

# Of Python's options those whose value may be the next word.
VALUED_FLAGS = ("-W", "-X", "--check-hash-based-pycs")
LAST = ("-m", "-c", "-", "--")  # they begin what ends its options
LIBRARY_SECONDS = 30.0  # for MPI to load and say what it is


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n", "ranks", type=click.IntRange(1), metavar="N", help="Number of ranks."
)
@click.option(
    "--hosts", "host_list", metavar="A,B", help="Hosts, also with ranks: a:2,b:2."
)
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
    type=options.Seconds(),
    default=GRACE_SECONDS,
    envvar=GRACE_VARIABLE,
    show_default=True,
    metavar="SECONDS",
    help="For the ranks to save and leave after SIGTERM or SIGUSR1.",
)
@click.option("--prefix", is_flag=True, help="Begin each line of output with its rank.")
@click.option(
    "--log-dir", type=click.Path(file_okay=False), help="Log each rank's lines there."
)
@click.option(
    "--timeout",
    type=options.Seconds(),
    metavar="SECONDS",
    help="End a job that takes longer, with status 124.",
)
@click.option(
    "--env", "given", multiple=True, metavar="NAME[=VALUE]", help="Set it on all hosts."
)
@click.option(
    "--mpiexec", metavar="PATH", help="The mpiexec to use, instead of the one on PATH."
)
@click.option("--dry-run", is_flag=True, help="Only print the command line.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print what happened as JSON, see above."
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
    prefix: bool,
    log_dir: str | None,
    given: tuple[str, ...],
    mpiexec: str | None,
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
        chainermn launch -n 4 -- -W error -X dev train.py

    It prints the line that it runs. What follows the script goes to it; what follows --
    is a command line of Python, with its own options.

    In a job of Slurm, PBS, LSF or SGE, hosts come from the job unless named, and ranks
    unless -n is given: its tasks, or one a node. The mpiexec is that on PATH, of MPICH
    or Open MPI or a relative. In Slurm, where that is missing or of another MPI than
    mpi4py's, it is srun.

    The job succeeds if mpiexec reports success and no rank fails. A rank fails by an
    error, by dying, or by os._exit. Otherwise the first rank that failed is shown, with
    its exit status and, of an exception, the traceback. With --max-restarts all ranks
    are then started anew, after a pause that grows; the script goes on from its last
    checkpoint, as with create_multi_node_checkpointer, and finds in CHAINERMN_RESTARTS
    how often it was. Rank 0 gets what is typed; Ctrl-C ends all. SIGTERM and SIGUSR1
    reach the ranks as SIGTERM, to save and leave with status 75.

    OMP_NUM_THREADS is set to a host's cores divided by its ranks, unless it, or another
    BLAS's variable, is set already.

    With --json all output of ranks goes to standard error, and one object to standard
    output.

    Exit status: 0 if the job succeeds; 2 if nothing starts; 75 if all ranks have saved
    and left; 124 after --timeout, or after CHAINERMN_TIMEOUT, the watchdog's limit; 130
    after Ctrl-C, and 128 + n after another signal n to this program. Else it is that of
    the rank that failed first: 1 after an exception, 128 + n after signal n.
    """
    try:
        named = options.named_hosts(host_list, hostfile)
        scheduler, allocated = jobs.find_allocation(os.environ) or (None, ())
        is_taken = not named and scheduler is not None
        if is_taken:
            named = allocated
            # More than it planned.
            if (ranks or 0) > sum(host.slots or 1 for host in named):
                named = tuple(jobs.Host(host.name, None) for host in named)
        if min_ranks is not None and not (named and how["max_restarts"]):
            raise ValueError(
                "--min-ranks needs --max-restarts, and --hosts or --hostfile"
            )
        if ranks is None and not named:
            raise ValueError("how many ranks? give -n, --hosts or --hostfile")
        hosts = jobs.assign_slots(named, ranks) if named else {}
        flags, words = _python_words(
            [*(["-m"] if is_module else []), script, *arguments]
        )
        if words[0] != "-m" and not os.path.exists(words[0]):
            raise ValueError(f"there is no {words[0]}")
        variables = dict(map(_variable, given))
        if log_dir is not None and not how["dry_run"]:
            os.makedirs(log_dir, exist_ok=True)
        launcher = _find_launcher(mpiexec, scheduler == "Slurm")
    except (ValueError, OSError, jobs.Unavailable) as error:
        raise click.UsageError(str(error)) from None
    if is_taken:
        shares = ",".join(f"{host}:{share}" for host, share in hosts.items())
        _log(f"{scheduler}'s job has {len(named)} hosts; ranks on {shares}")
    how |= {
        "hosts": hosts,
        "prefix": prefix or log_dir is not None,
        "min_ranks": min_ranks,
    }
    how |= {"flags": flags, "variables": variables, "to_stderr": as_json}
    how |= {"log_dir": None if log_dir is None else Path(log_dir)}
    result, output = run_script(
        launcher, ranks or sum(hosts.values()), words, _log, **how
    )
    if not result.success:
        step = result.next_step or next_step(result.cause)
        result = dataclasses.replace(result, next_step=step)
        _log(result.message)
    if as_json:
        hosts_of = (
            event["host"] for event in output.events if event.rank == result.rank
        )
        found = dataclasses.asdict(result) | {
            "host": next(hosts_of, None),
            "hosts": hosts,
        }
        found |= {"next_step": result.next_step.strip(), "restarts": output.restarts}
        found |= {"command": output.command}
        click.echo(json.dumps(found, indent=2))
    ctx.exit(result.status)


def _python_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide a command line of Python: its options; a script, or -m and a module, and arguments."""
    flags, rest = [], list(words)
    while (
        rest
        and rest[0][:1] == "-"
        and (rest[0][:2] not in LAST or rest[0] in VALUED_FLAGS)
    ):
        flags.append(rest.pop(0))
        flags += [rest.pop(0)] if flags[-1] in VALUED_FLAGS and rest else []
    if not rest or rest == ["-m"] or (rest[0] != "-m" and rest[0][:1] == "-"):
        raise ValueError(
            f"name a script, or a module after -m and a blank, not {' '.join(rest)!r}"
        )
    return flags, rest


def _variable(text: str) -> tuple[str, str]:
    """Return name and value of ``NAME=VALUE``, or of ``NAME`` with its value here."""
    name, is_given, value = text.partition("=")
    if name in (GRACE_VARIABLE, RESTARTS_VARIABLE):
        raise ValueError(
            f"--env {name}: launch itself sets that; --grace takes the seconds"
        )
    if not name.isidentifier() or (not is_given and name not in os.environ):
        raise ValueError(
            f"--env {text}: write NAME=VALUE, or the NAME of a variable that is set"
        )
    return name, value if is_given else os.environ[name]


def _find_launcher(mpiexec: str | None, in_slurm: bool) -> dict[str, Any]:
    """Return the mpiexec; in Slurm srun where that can't start ranks of mpi4py's MPI.

    Raise Unavailable if there is none.
    """
    if mpiexec or not in_slurm:
        return jobs.find_mpiexec(mpiexec or "mpiexec")
    library = environment.call_in_subprocess(environment.mpi_library, LIBRARY_SECONDS)
    try:
        launcher = jobs.find_mpiexec()
        reason = environment.mpi_mismatch(library, launcher)
    except jobs.Unavailable as error:
        launcher, reason = {}, str(error)
    if reason is None:
        return launcher
    _log(f"srun starts the ranks: {reason}")
    return jobs.find_srun(library["vendor"])


def _log(text: str) -> None:
    sys.stdout.flush()
    click.echo(f"chainermn launch: {text}", err=True)
