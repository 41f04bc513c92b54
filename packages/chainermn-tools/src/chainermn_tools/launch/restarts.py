"""Runs a script as a job, and starts it again after a failure."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chainermn_tools import jobs
from chainermn_tools.launch.classification import JobResult, classify


def run_script(
    launcher: Mapping[str, Any],
    ranks: int,
    script: Sequence[str],
    say: Callable[[str], None],
    *,
    hosts: Mapping[str, int] | None = None,
    prefix: bool = False,
    timeout: float | None = None,
    max_restarts: int = 0,
) -> tuple[JobResult, jobs.JobOutput]:
    """Run a Python script on several ranks until it succeeds or may not start again.

    A signal ends the job; the output's ``interrupted`` has it.

    Args:
        launcher: as :func:`chainermn_tools.jobs.find_mpiexec` returns it.
        ranks: the number of ranks.
        script: the script and its arguments.
        say: reports to the user.
        hosts: how many ranks each host gets; None or empty for this one alone.
        prefix: whether lines of output begin with their rank.
        timeout: seconds after which a job is ended; None for no limit.
        max_restarts: how often to start again.

    Returns:
        The last result, and the last job's output.

    Raises:
        OSError: mpiexec can't be started, or the output can't be written.
    """
    threads = jobs.threads_per_rank(ranks, hosts)
    chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    env = {**os.environ, **chosen}
    command = jobs.rank_command(*script)
    args = jobs.mpiexec_command(
        launcher, ranks, command, hosts=hosts, prefix=prefix, threads=threads, variables=env
    )
    say(" ".join([*(f"{name}={value}" for name, value in chosen.items()), shlex.join(args)]))
    with jobs.capture_signals() as signals:
        for attempt in range(max_restarts + 1):
            if attempt:
                say(f"starting again, {attempt} of {max_restarts}")
            output = jobs.run_job(args, env, timeout=timeout, signals=signals, tagged=prefix)
            result = classify(output, ranks)
            if output.tail and not output.tail.endswith(b"\n"):
                os.write(2, b"\n")
            if output.interrupted is not None or result.success or not result.restartable:
                break
            if attempt < max_restarts:
                say(result.message)
    return result, output
