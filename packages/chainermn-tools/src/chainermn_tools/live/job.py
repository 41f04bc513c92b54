"""Finds this user's running jobs on this host, and asks their monitors what the ranks do."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import click
import psutil  # type: ignore[import-untyped]

from chainermn_comm.watchdog.diagnosis import WaitGraph, rank_from_reply

# What a monitor's socket in Linux's abstract namespace is called; the monitor's PID
# follows.
NAME = "chainermn monitor "
# What programs that start ranks are called; the nearest above a rank gives its job a
# number.
LAUNCHERS = ("mpiexec", "mpirun", "orterun", "prte", "srun", "slurmstepd")
# A monitor waits 1.5 s for stacks of its ranks, and 2.5 s for the answers of other
# hosts.
ANSWER_SECONDS = 10.0


class LiveJob(NamedTuple):
    """A job that runs on this host."""

    number: int  # the PID of its launcher here, or else of a rank
    command: str  # of a rank
    monitors: list[int]  # their PIDs


def choose(number: int | None) -> LiveJob:
    """Return the job to which this PID belongs, or the only one; UsageError if none fits."""
    jobs: dict[int, LiveJob] = {}
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines():
        # No monitor's, or it has just ended.
        with suppress(psutil.Error, ValueError, IndexError):
            monitor = psutil.Process(int(line.partition(f" @{NAME}")[2]))
            ranks = [
                psutil.Process(int(word))
                for word in monitor.cmdline()
                if word.isdigit()
            ]
            known = [*ranks, *(each for each in ranks[0].parents() if each.pid > 1)]
            is_it = number in (None, *(each.pid for each in known))
            if is_it and monitor.uids().effective == os.geteuid():
                launchers = [
                    each for each in known if each.name().startswith(LAUNCHERS)
                ]
                pid, command = (launchers or ranks)[0].pid, " ".join(ranks[0].cmdline())
                jobs.setdefault(pid, LiveJob(pid, command, [])).monitors.append(
                    monitor.pid
                )
    if len(jobs) != 1:
        why = (
            "give the number of one"
            if jobs
            else "its ranks may not have a communicator yet"
        )
        listed = "".join(f"\n  {job.number}  {job.command}" for job in jobs.values())
        raise click.UsageError(
            f"{len(jobs) or 'no'} such jobs of yours here; {why}{listed}"
        )
    return jobs.popitem()[1]


def ask(job: LiveJob, what: str) -> WaitGraph:
    """Return what the job's monitors say of "calls" or "stacks"; ClickException if none does."""
    # Twice: a monitor doesn't wait for who was stopped (Ctrl-Z) in the middle of a
    # question.
    answers = [
        _answer(monitor, what) or _answer(monitor, what) for monitor in job.monitors
    ]
    said = [answer for answer in answers if answer]
    if not said:
        raise click.ClickException(f"job {job.number} has ended")
    unseen = [name for each in said for name in each["unseen"]]
    return WaitGraph(
        (rank_from_reply(rank) for each in said for rank in each["ranks"]), unseen
    )


def _answer(monitor: int, what: str) -> dict[str, Any] | None:
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(ANSWER_SECONDS)
            link.connect(f"\0{NAME}{monitor}")
            link.sendall(what.encode())
            with link.makefile("rb") as file:
                return dict(json.load(file))
    except TimeoutError:
        why = f"the job's monitor, process {monitor}, doesn't answer; is it stopped?"
        raise click.ClickException(why) from None
    except (OSError, ValueError):  # it has ended
        return None
