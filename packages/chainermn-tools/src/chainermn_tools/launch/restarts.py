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
    log: Callable[[str], None],
    *,
    hosts: Mapping[str, int] | None = None,  # ranks of each; None or empty for this one alone
    prefix: bool = False,  # whether lines of output begin with their rank
    timeout: float | None = None,  # seconds after which a job is ended
    max_restarts: int = 0,
) -> tuple[JobResult, jobs.JobOutput]:
    """Run a Python script with its arguments on several ranks, and again after failures.

    It is not started again where that can't help, after a signal or its time limit. Return the last
    result, and the last job's output. Raise OSError if the output can't be written.
    """
    threads = jobs.threads_per_rank(ranks, hosts)
    chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    env = {**os.environ, **chosen}
    args = jobs.mpiexec_command(
        launcher, ranks, script, hosts=hosts, prefix=prefix, threads=threads, variables=env
    )
    log(" ".join([*(f"{name}={value}" for name, value in chosen.items()), shlex.join(args)]))
    signals: list[int] = []
    with jobs.handle_signals(signals.append):
        for attempt in range(max_restarts + 1):
            if attempt:
                log(f"starting again, {attempt} of {max_restarts}")
            try:
                output = jobs.run_job(args, env, timeout=timeout, signals=signals, tagged=prefix)
            except FileNotFoundError as error:
                return JobResult(False, 2, f"mpiexec doesn't start: {error}"), jobs.JobOutput()
            if output.tail and not output.tail.endswith(b"\n"):
                os.write(2, b"\n")
            if (number := output.interrupted) is not None:
                return JobResult(False, 128 + number, f"ended by signal {number}"), output
            if output.timed_out:
                message = f"the job did not end within {timeout:g} s"
                return JobResult(False, jobs.TIMEOUT_STATUS, message), output
            result = classify(output, ranks)
            if result.success or not result.restartable:
                break
            if attempt < max_restarts:
                log(result.message)
    return result, output
