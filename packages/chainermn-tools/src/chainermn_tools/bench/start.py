"""Starts the ranks through mpiexec, and waits for what rank 0 says."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import threading
from collections.abc import Sequence
from typing import Any

from chainermn_tools import jobs
from chainermn_tools.bench import rank
from chainermn_tools.launch import job, verdict

# Beyond the time that the ranks give themselves: to start, and to end by themselves first.
START_SECONDS = 30.0


class Failed(Exception):
    """The job gave no result. The message says why; `status` is the exit status to end with."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def measure_on(
    ranks: int, names: Sequence[str], sizes: Sequence[int], seconds: float, limit: float
) -> dict[str, Any]:
    """Start so many ranks, as `chainermn launch` would, and have them measure.

    Args:
        ranks: how many.
        names: as for :func:`rank.measure_here`, like the others.
        sizes: likewise.
        seconds: likewise.
        limit: likewise.

    Raises:
        Failed: there is no mpiexec, or the job failed, was interrupted, or took too long.
    """
    try:
        mpiexec = jobs.find_mpiexec()
    except ValueError as problem:
        raise Failed(str(problem), 2) from None
    threads = jobs.threads_per_rank(ranks)
    chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    environment = {**os.environ, **chosen, jobs.JOB_VARIABLE: secrets.token_hex(8)}
    what = {"names": list(names), "sizes": list(sizes), "seconds": seconds, "limit": limit}
    args = jobs.mpiexec_command(
        mpiexec,
        ranks,
        jobs.rank_command(rank.__file__, json.dumps(what)),
        threads=threads,
        variables=environment,
    )
    rank.say(" ".join([*(f"{name}={value}" for name, value in chosen.items()), shlex.join(args)]))
    with job.noting_signals() as signals:
        timer = threading.Timer(limit + START_SECONDS, signals.append, (signal.SIGALRM,))
        timer.daemon = True
        timer.start()
        try:
            outcome = job.run(args, environment, signals, bytes)
        except FileNotFoundError as problem:
            raise Failed(f"mpiexec doesn't start: {problem}", 2) from None
        finally:
            timer.cancel()
    said = outcome.of_kind(rank.KIND)
    if outcome.interrupted == signal.SIGALRM:
        raise Failed(f"the job did not end within {limit + START_SECONDS:g} s", rank.TIMED_OUT)
    if outcome.interrupted is not None:
        raise Failed(f"ended by signal {outcome.interrupted}", 128 + outcome.interrupted)
    found = verdict.judge(outcome, ranks)
    if not found.good:
        raise Failed(found.text, found.status)
    if 0 not in said:
        raise Failed("all ranks ended well, but the result of rank 0 did not arrive here", 1)
    report: dict[str, Any] = said[0]["report"]
    return report
