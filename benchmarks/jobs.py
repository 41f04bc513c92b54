"""Starts a benchmark's ranks: by mpiexec on this machine, or on hosts made of namespaces."""

from __future__ import annotations

import argparse
import faulthandler
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from chainermn_tools.jobs import (
    TIMEOUT_STATUS,
    Unavailable,
    find_mpiexec,
    mpiexec_command,
    rank_from_env,
    run_job,
)

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "result"
# Set for the ranks of `start_on_hosts_and_run`.
ON_HOSTS = "CHAINERMN_BENCHMARK_ON_HOSTS"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
GRACE_SECONDS = 5.0  # between the stacks and the end, for every rank to print its own


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows a module's docstring as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def is_rank() -> bool:
    """Return whether a launcher started this process as a rank."""
    return rank_from_env() is not None


def start_and_run(
    args: argparse.Namespace, ranks: int, run: Callable[[argparse.Namespace], bool]
) -> int:
    """Run this script on so many ranks, or as the rank that this process is; return the status."""
    return run_as_rank(args, run) if is_rank() else start(ranks, [], args.timeout)


def run_as_rank(
    args: argparse.Namespace, run: Callable[[argparse.Namespace], bool]
) -> int:
    """Run the benchmark as a rank for at most ``args.timeout`` seconds; return the exit status."""
    end_after(args.timeout)
    for variable in THREADS:
        os.environ.setdefault(variable, "1")  # before NumPy loads its BLAS
    return 0 if run(args) else 1


def start(ranks: int, arguments: Sequence[str], timeout: float) -> int:
    """Run this script on so many ranks, with arguments after its own; return mpiexec's status."""
    try:
        command = mpiexec_command(
            find_mpiexec(), ranks, [*sys.argv, *arguments], threads=1
        )
    except Unavailable as problem:
        raise SystemExit(str(problem)) from None
    # The ranks can't know: MPICH gives them a pipe in any case, Open MPI a terminal.
    color = {"FORCE_COLOR": "1"} if sys.stdout.isatty() else {"TERM": "dumb"}
    columns = {"COLUMNS": str(max(110, shutil.get_terminal_size().columns))}
    environment = os.environ | dict.fromkeys(THREADS, "1") | color | columns
    # The ranks end by themselves; this limit is for an mpiexec that doesn't.
    job = run_job(command, environment, timeout=timeout + 2 * GRACE_SECONDS)
    return TIMEOUT_STATUS if job.timed_out else job.status


def end_after(seconds: float) -> None:
    """Print this rank's stacks after so many seconds and end the job."""
    # By a signal: a thread that reads the main one's frames while that runs on may
    # crash.
    faulthandler.register(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    timer = threading.Timer(seconds + GRACE_SECONDS, os._exit, (TIMEOUT_STATUS,))
    timer.daemon = True
    timer.start()


def start_on_hosts_and_run(
    args: argparse.Namespace,
    ranks: Mapping[str, int],
    run: Callable[[argparse.Namespace], bool],
    files: Sequence[str],
    environment: Mapping[str, str],
) -> int:
    """Make hosts and run this script on their ranks, or run as one of these; return the status.

    Args:
        args: of the script; ``rate`` is what each host may send, such as ``"1gbit"``,
            and ``timeout`` the seconds for the whole run.
        ranks: how many ranks each host has, by its name.
        run: the benchmark, on a rank.
        files: arguments that name files, which the ranks must find from any folder.
        environment: variables of the ranks.
    """
    if ON_HOSTS in os.environ:
        # When it has lasted too long.
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        return 0 if run(args) else 1
    sys.path.insert(0, str(ROOT))
    from tests.support.hosts.virtual_hosts import Cluster, missing

    lacking = missing()
    if lacking:
        raise SystemExit(f"no hosts can be made here: {lacking}")
    words = [Path(sys.argv[0]).resolve(), *sys.argv[1:]]
    for name in files:
        words += [f"--{name}", getattr(args, name).resolve()]
    with Cluster(tuple(ranks)) as cluster:
        cluster.limit(args.rate)
        variables = {ON_HOSTS: "1", **environment}
        job = cluster.job(
            dict(ranks), *words, environment=variables, seconds=args.timeout
        )
    print(job.out, end="")
    print(job.err, end="", file=sys.stderr)
    return TIMEOUT_STATUS if job.returncode is None else job.returncode
