"""Runs a script as a job, and starts it again after a failure."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from _chainermn_events import (
    GRACE_SECONDS,
    GRACE_VARIABLE,
    LEAVING_STATUS,
    RESTARTS_VARIABLE,
)
from chainermn_tools import jobs
from chainermn_tools.explain import next_step
from chainermn_tools.formatting import format_count
from chainermn_tools.launch.verdict import JobResult, classify, of_signal

# The longest pause before the job is started again. The first pause is one second, and
# each pause is twice as long as the one before.
LONGEST_PAUSE_SECONDS = 60.0
PAUSE_STEP_SECONDS = 0.1
ANSWER_SECONDS = 10.0  # the time for a host to answer


def run_script(
    launcher: Mapping[str, Any],
    ranks: int,
    script: Sequence[str],
    log: Callable[..., None],  # of a text, and of the text before its line
    *,
    hosts: Mapping[str, int] = {},  # the ranks of each host; empty for this host alone
    timeout: float | None = None,  # the seconds after which a job is ended
    max_restarts: int = 0,
    min_ranks: int | None = None,
    grace: float = GRACE_SECONDS,
    variables: Mapping[str, str] = {},  # variables to be set on all hosts
    dry_run: bool = False,  # only log the command line
    **options: Any,  # as for `jobs.mpiexec_command`
) -> tuple[JobResult, jobs.JobOutput]:
    """Run a Python script with its arguments on several ranks, and again after failures.

    With ``min_ranks`` the job is started again on the hosts that answer, once these
    have as many ranks. The job is not started again if that can't help, after a signal,
    or after its time limit. A signal that warns gives the ranks ``grace`` seconds to
    save and leave. Return the last result, and the last job's output. Raise OSError if
    the output can't be written.
    """
    signals: list[int] = []
    known = hosts
    result = JobResult(False, 1)
    output = jobs.JobOutput()
    with jobs.handle_signals(signals.append):
        for attempt in range(max_restarts + 1):
            if attempt:
                _pause(min(LONGEST_PAUSE_SECONDS, 2.0 ** (attempt - 1)), signals)
                if signals:
                    break
                if min_ranks is not None:
                    those = [host for host in known if answers(launcher, host)]
                    hosts = {host: known[host] for host in those}
                    ranks = sum(hosts.values())
                    if ranks < min_ranks:
                        log(f"only {ranks} of {min_ranks} ranks have hosts that answer")
                        continue
                started = format_count(ranks, "rank")
                log(f"restart {attempt} of {max_restarts}, with {started}")
            chosen = {**_variables(ranks, hosts), **variables}
            env = {**os.environ, **chosen, RESTARTS_VARIABLE: str(attempt)}
            env[GRACE_VARIABLE] = f"{grace:g}"
            args = jobs.mpiexec_command(
                launcher,
                ranks,
                script,
                hosts=hosts,
                variables=env,
                passed=variables,
                **options,
            )
            shown = [f"{name}={shlex.quote(text)}" for name, text in chosen.items()]
            log(" ".join([*shown, shlex.join(args)]))
            if dry_run:
                return JobResult(True, 0), jobs.JobOutput(command=args)
            output = jobs.run_job(
                args,
                env,
                ranks=ranks,
                timeout=timeout,
                signals=signals,
                grace=grace,
            )
            output.command = args
            output.restarts = attempt
            if output.tail and not output.tail.endswith(b"\n"):
                os.write(2, b"\n")
            result = _judge(output, ranks, timeout)
            # After a restart, the failure to start any rank may be temporary.
            may_help = result.restartable or (attempt and not output.events)
            if result.success or signals or not may_help:
                break
            if attempt < max_restarts:
                log(result.message, result.traceback)
    return result, output


def _variables(ranks: int, hosts: Mapping[str, int]) -> dict[str, str]:
    """Return the variables for the ranks that this process's environment lacks."""
    chosen = {}
    # This process is in a step of Slurm, so the job's steps run beside it.
    if "SLURM_STEP_ID" in os.environ:
        chosen.update(jobs.BESIDE)
    if not hosts:  # otherwise each rank counts the cores of its own host
        threads = jobs.threads_per_rank(ranks)
        if threads is not None:
            chosen["OMP_NUM_THREADS"] = str(threads)
    return chosen


def _judge(output: jobs.JobOutput, ranks: int, timeout: float | None) -> JobResult:
    """Classify a job, which this process may have ended."""
    result = classify(output, ranks)
    if output.interrupted is not None:
        if not result.success and result.status != LEAVING_STATUS:
            return of_signal(output.interrupted)
    elif output.timed_out:
        late = f"the job did not end within {timeout:g} s"
        step = next_step(late)
        return JobResult(False, jobs.TIMEOUT_STATUS, late, step, restartable=False)
    return result


def _pause(seconds: float, signals: Sequence[int]) -> None:
    """Wait, but only until a signal comes."""
    end = time.monotonic() + seconds
    while not signals and time.monotonic() < end:
        time.sleep(PAUSE_STEP_SECONDS)


def answers(launcher: Mapping[str, Any], host: str) -> bool:
    """Return whether a command can be run on a host now, as mpiexec would start one."""
    if jobs.is_here(host):
        return True
    command = jobs.remote_command(launcher["vendor"], host, "true", ANSWER_SECONDS)
    try:
        return jobs.run(command, ANSWER_SECONDS).returncode == 0
    except OSError:  # there is no ssh
        return False
