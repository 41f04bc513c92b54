"""Starts ranks and times cases in turn on them: what every benchmark begins with.

Benchmarks import it before MPI (``import runner`` stands above ``from mpi4py import
MPI``), because the process that starts the ranks must not start MPI itself.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mpi4py
import numpy as np
from threadpoolctl import threadpool_limits

from chainermn_tools.bench.timing import idle_barrier
from chainermn_tools.jobs import (
    TIMEOUT_STATUS,
    Unavailable,
    find_mpiexec,
    mpiexec_command,
    rank_from_env,
    run_job,
)

IS_RANK = rank_from_env() is not None
if Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parent:
    mpi4py.rc.initialize = IS_RANK

if TYPE_CHECKING:
    from mpi4py import MPI

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "result"
# A communicator measures its ways in the first nine means before it chooses one.
WARM_UP_ROUNDS = 10
# The second call in a row counts: as in a loop, its code and its data are in the caches.
IN_A_ROW = 2

Row = dict[str, Any]  # what was measured of a case; see `measure`
Run = Callable[[argparse.Namespace, "MPI.Intracomm"], bool]


def parser(
    description: str | None,
    *,
    rounds: int,
    ranks: Sequence[int] = (2,),  # none if the program has other words for them
    json: Path | None = None,
    model: str = "",  # unless another one of these is asked for
    models: Iterable[str] = (),
) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    if ranks:
        help_ranks = "how many to start, one number after the other"
        add(
            "--ranks",
            type=positive,
            nargs="+",
            default=ranks,
            metavar="N",
            help=help_ranks,
        )
    if model:
        names = ", ".join(models)
        add("--model", default=model, choices=models, metavar="NAME", help=names)
    add("--rounds", type=positive, default=rounds, help="turns of a case (%(default)s)")
    add("--json", type=Path, default=json, metavar="FILE", help="what was measured")
    add("--timeout", type=float, default=900, help="seconds of each job (%(default)s)")
    return made


def positive(text: str) -> int:
    """Return the number that an argument names, 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def main(args: argparse.Namespace, run: Run) -> int:
    """Run the benchmark on each number of ranks, or as a rank; return the exit status."""
    if IS_RANK:
        return _run_as_rank(args, run)
    statuses = []
    for ranks in args.ranks:
        words: list[object] = []
        if args.json is not None and len(args.ranks) > 1:
            words = ["--json", args.json.with_stem(f"{args.json.stem}-{ranks}")]
        statuses.append(start(ranks, args.timeout, *words))
    return max(statuses)


def start(ranks: int, timeout: float, *arguments: object) -> int:
    """Run this script on so many ranks, with arguments after its own; return the status."""
    words = [*sys.argv, *map(str, arguments)]
    try:
        command = mpiexec_command(find_mpiexec(), ranks, words, threads=1)
    except Unavailable as problem:
        raise SystemExit(str(problem)) from None
    job = run_job(command, os.environ, timeout=timeout)
    if job.timed_out:
        return TIMEOUT_STATUS
    return job.status


def main_on_hosts(
    args: argparse.Namespace,
    run: Run,
    jobs: Sequence[Mapping[str, int]],  # of each, how many ranks a host has
    files: Sequence[str],  # options that name files
) -> int:
    """Run jobs on hosts that are namespaces of this machine, or run as a rank of one.

    ``args.rate`` is what each host may send, such as ``"1gbit"``, and ``args.burst``
    what may be sent faster.
    """
    if IS_RANK:
        return _run_as_rank(args, run)
    sys.path.insert(0, str(ROOT))
    from tests.support.hosts.virtual_hosts import Cluster, missing

    lacking = missing()
    if lacking:
        raise SystemExit(f"no hosts can be made here: {lacking}")
    words: list[object] = [Path(sys.argv[0]).resolve(), *sys.argv[1:]]
    for name in files:  # the hosts' folder is another
        words += [f"--{name}", getattr(args, name).resolve()]
    for ranks in jobs:
        with Cluster(tuple(ranks)) as cluster:
            cluster.limit(args.rate, args.burst)
            environment = {"OMP_NUM_THREADS": "1"}
            job = cluster.job(
                dict(ranks), *words, environment=environment, seconds=args.timeout
            )
        print(job.out, end="", flush=True)
        print(job.err, end="", file=sys.stderr)
        if job.returncode is None:
            return TIMEOUT_STATUS
        if job.returncode:
            return job.returncode
    return 0


def _run_as_rank(args: argparse.Namespace, run: Run) -> int:
    from mpi4py import MPI

    threadpool_limits(1)  # ranks share the cores
    if run(args, MPI.COMM_WORLD.Dup()):
        return 0
    return 1


def nothing() -> None:
    """Do nothing."""


def always() -> bool:
    """Return True, of what has no result."""
    return True


@dataclass(frozen=True)
class Case:
    """What is timed beside others."""

    name: str
    call: Callable[[], object]
    prepare: Callable[[], object] = nothing  # before each call, not timed
    is_right: Callable[[], bool] = always  # whether the last call did what it should
    finish: Callable[[], object] = nothing  # at the end of its turn, not timed
    kind: str = "peer"  # or "ours"; other words are a benchmark's own
    rank_0_only: bool = False  # only rank 0 calls it, while the other ranks sleep


def measure(
    comm: MPI.Intracomm,
    cases: Sequence[Case],  # the same on all ranks
    rounds: int,
    *,
    warm_up: int = WARM_UP_ROUNDS,
    in_a_row: int = IN_A_ROW,  # of these calls the last counts
    calls: int = 1,  # whose mean counts as one time
) -> list[Row]:
    """Time cases in turn, in another order each round (collective).

    On a machine that others share, a figure is to be compared with its neighbours of a
    round.

    Return for each case its name and kind; ``ms``, milliseconds of a call on the
    slowest rank, for each round; ``median_ms``; ``right``, whether the results of its
    first and its last call were.
    """
    right = [_is_right(comm, case) for case in cases]
    warm_up = min(warm_up, rounds)  # a short run need not be exact
    seconds = np.zeros((warm_up + rounds, len(cases)))
    gc.collect()
    gc.disable()
    try:
        for turn, place in np.ndindex(seconds.shape):
            index = (place + turn) % len(cases)
            for _ in range(in_a_row):
                seconds[turn, index] = _time(comm, cases[index], calls)
    finally:
        gc.enable()
    seconds = np.max(comm.allgather(seconds), axis=0)[warm_up:]
    rows = []
    for case, was_right, took in zip(cases, right, seconds.T, strict=True):
        ms = (1e3 * took).round(6)
        rows.append(
            {
                "name": case.name,
                "kind": case.kind,
                "ms": ms.tolist(),
                "median_ms": float(np.median(ms)),
                "right": was_right and _is_right(comm, case),
            }
        )
    return rows


def _time(comm: MPI.Intracomm, case: Case, calls: int) -> float:
    """Return the seconds that each of some calls in a row took on this rank (collective)."""
    case.prepare()
    comm.Barrier()
    took = 0.0
    if _is_called(comm, case):
        start = time.perf_counter()
        for _ in range(calls):
            _kept = (
                case.call()
            )  # what it returned last is freed after the time was taken
        took = time.perf_counter() - start
    if case.rank_0_only:
        idle_barrier(comm)
    case.finish()
    return took / calls


def _is_right(comm: MPI.Intracomm, case: Case) -> bool:
    """Call once more; return whether all ranks have the right result (collective)."""
    _time(comm, case, 1)
    right = True
    if _is_called(comm, case):
        right = case.is_right()
    return all(comm.allgather(right))


def _is_called(comm: MPI.Intracomm, case: Case) -> bool:
    return comm.rank == 0 or not case.rank_0_only
