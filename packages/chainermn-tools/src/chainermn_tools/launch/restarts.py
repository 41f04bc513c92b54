"""Runs a script as a job, and starts it again after a failure."""

from __future__ import annotations

import itertools
import os
import shlex
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from _chainermn_events import (
    GRACE_SECONDS,
    GRACE_VARIABLE,
    LEAVING_STATUS,
    RESTARTS_VARIABLE,
)
from chainermn_tools import jobs
from chainermn_tools.explain import next_step
from chainermn_tools.launch.verdict import JobResult, classify, of_signal

# Before the job is started again: one second, then twice as long each time, up to this.
LONGEST_PAUSE_SECONDS, PAUSE_STEP_SECONDS = 60.0, 0.1
# For a host to answer, and hosts that are asked at a time.
ANSWER_SECONDS, MOST_AT_A_TIME = 10.0, 32


def run_script(
    launcher: Mapping[str, Any],
    ranks: int,
    script: Sequence[str],
    log: Callable[[str], None],
    *,
    # Ranks of each; None or empty for this one alone.
    hosts: Mapping[str, int] | None = None,
    prefix: bool = False,  # whether lines of output begin with their rank
    timeout: float | None = None,  # seconds after which a job is ended
    max_restarts: int = 0,
    min_ranks: int | None = None,
    grace: float = GRACE_SECONDS,
    flags: Sequence[str] = (),  # of Python
    variables: Mapping[str, str] = {},  # to be set on all hosts
    dry_run: bool = False,  # only log the command line
    **to: Any,  # where output goes, as for `jobs.run_job`
) -> tuple[JobResult, jobs.JobOutput]:
    """Run a Python script with its arguments on several ranks, and again after failures.

    With ``min_ranks`` it is started again on hosts that answer, once they have as many
    ranks. It is not started again where that can't help, after a signal or its time
    limit. A signal that warns gives the ranks ``grace`` seconds to save and leave.
    Return the last result, and the last job's output. Raise OSError if the output can't
    be written.
    """
    signals: list[int] = []
    known = hosts
    result, output = JobResult(False, 1), jobs.JobOutput()
    with jobs.handle_signals(signals.append):
        for attempt in range(max_restarts + 1):
            if attempt:
                _pause(min(LONGEST_PAUSE_SECONDS, 2.0 ** (attempt - 1)), signals)
                if signals:
                    break
                if min_ranks is not None and known:
                    hosts = {
                        host: known[host] for host in answering(launcher, [*known])
                    }
                    ranks = sum(hosts.values())
                    if ranks < min_ranks:
                        log(
                            f"hosts that answer have {ranks} ranks, less than {min_ranks}"
                        )
                        continue
                log(f"starting again with {ranks} ranks, {attempt} of {max_restarts}")
            threads = None if hosts else jobs.threads_per_rank(ranks)
            # A step within one.
            chosen = dict(jobs.BESIDE) if "SLURM_STEP_ID" in os.environ else {}
            chosen |= {
                **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
                **variables,
            }
            env = {**os.environ, **chosen}
            env |= {RESTARTS_VARIABLE: str(attempt), GRACE_VARIABLE: f"{grace:g}"}
            how: dict[str, Any] = {"hosts": hosts, "prefix": prefix, "threads": threads}
            how |= {"flags": flags, "variables": env, "passed": variables}
            args = jobs.mpiexec_command(launcher, ranks, script, **how)
            settings = (
                f"{name}={shlex.quote(value)}" for name, value in chosen.items()
            )
            log(" ".join([*settings, shlex.join(args)]))
            if dry_run:
                return JobResult(True, 0), jobs.JobOutput(command=args)
            try:
                output = jobs.run_job(
                    args,
                    env,
                    timeout=timeout,
                    signals=signals,
                    tagged=prefix,
                    grace=grace,
                    **to,
                )
            except FileNotFoundError as error:
                return JobResult(
                    False, 2, f"mpiexec doesn't start: {error}"
                ), jobs.JobOutput()
            output.command, output.restarts = args, attempt
            if output.tail and not output.tail.endswith(b"\n"):
                os.write(2, b"\n")
            if (number := output.interrupted) is not None:
                result = classify(output, ranks)
                if not result.success and result.status != LEAVING_STATUS:
                    result = of_signal(number)
                return result, output
            if output.timed_out:
                late = f"the job did not end within {timeout:g} s"
                return JobResult(
                    False, jobs.TIMEOUT_STATUS, late, next_step(late)
                ), output
            result = classify(output, ranks)
            # Later, that no rank began may be an affair of the moment.
            is_final = attempt == 0 or result.status == LEAVING_STATUS
            if result.success or (is_final and not result.restartable):
                break
            if attempt < max_restarts:
                log(result.message)
    return result, output


def _pause(seconds: float, signals: Sequence[int]) -> None:
    """Wait, but not for longer than until a signal comes."""
    end = time.monotonic() + seconds
    while not signals and time.monotonic() < end:
        time.sleep(PAUSE_STEP_SECONDS)


def answering(launcher: Mapping[str, Any], hosts: Sequence[str]) -> list[str]:
    """Return the hosts on which a command can be run now, as mpiexec would start one."""
    here = {"localhost", socket.gethostname(), socket.gethostname().split(".")[0]}

    def answers(host: str) -> bool:
        command = jobs.remote_command(launcher["vendor"], host, "true", ANSWER_SECONDS)
        try:
            return host in here or jobs.run(command, ANSWER_SECONDS).returncode == 0
        except OSError:  # there is no ssh
            return False

    with ThreadPoolExecutor(MOST_AT_A_TIME) as pool:
        return list(itertools.compress(hosts, pool.map(answers, hosts)))
