"""Finds this user's running jobs on this host, and asks their monitors what the ranks do."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import click
import psutil  # type: ignore[import-untyped]

from chainermn_comm.watchdog.diagnosis import WaitGraph, rank_from_json
from chainermn_comm.watchdog.processes import MONITOR_NAME, peer_of

# The names of programs that start ranks. The nearest one above a rank gives its job a
# number.
LAUNCHERS = ("mpiexec", "mpirun", "orterun", "prte", "srun", "slurmstepd")
# A monitor waits 1.5 s for stacks of its ranks, and 2.5 s for the answers of other
# hosts.
ANSWER_SECONDS = 10.0
ANSWER_BYTES = 1 << 16


class LiveJob(NamedTuple):
    """A job that runs on this host."""

    number: int  # the PID of its launcher here, or else of a rank
    command: str  # of a rank
    began: str  # when and where
    monitors: list[str]  # the names of their sockets
    # The PIDs of its ranks here, and of all processes above them but the first.
    pids: set[int]


def choose(number: int | None) -> LiveJob:
    """Return the job to which this PID belongs, or the only one; UsageError if none fits."""
    jobs: dict[int, LiveJob] = {}
    sockets = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    # The sockets of connections have the same name.
    names = {line.partition(f" @{MONITOR_NAME}")[2] for line in sockets}
    for name in sorted(names - {""}):
        # The process is in another PID namespace, or has just ended.
        with suppress(psutil.Error, ValueError, IndexError):
            _add_job(jobs, name)
    if not jobs:
        raise click.UsageError(
            "no job of yours runs here whose ranks, two or more, have made a communicator"
        )
    chosen = [job for job in jobs.values() if number is None or number in job.pids]
    if len(chosen) == 1:
        return chosen[0]
    what = f"{len(chosen)} jobs of yours run here"
    if not chosen:
        what = f"no job of process {number} is seen here"
    listed = "".join(
        f"\n  {job.number}  {job.began}: {job.command}"
        for job in chosen or jobs.values()
    )
    raise click.UsageError(f"{what}; give the number of one of these:{listed}")


def _add_job(jobs: dict[int, LiveJob], name: str) -> None:
    """Add the job of a monitor, whose name begins with the PID of the ranks' launcher."""
    launcher = psutil.Process(int(name.split()[0]))
    user = os.geteuid()
    ranks = [child for child in launcher.children() if child.uids().effective == user]
    above = [launcher, *launcher.parents()]
    pid = ranks[0].pid
    for each in above:
        if each.name().startswith(LAUNCHERS):
            pid = each.pid
            break
    command = " ".join(ranks[0].cmdline())
    since = datetime.fromtimestamp(ranks[0].create_time())
    began = f"since {since:%Y-%m-%d %H:%M:%S} in {ranks[0].cwd()}"
    job = jobs.setdefault(pid, LiveJob(pid, command, began, [], set()))
    job.monitors.append(name)
    job.pids.update({each.pid for each in (*ranks, *above)} - {1})


def ask(job: LiveJob, what: str) -> WaitGraph:
    """Return what the job's monitors say of "calls" or "stacks"; ClickException if none does."""
    # Ask twice, because a monitor doesn't wait for a process that was stopped (Ctrl-Z)
    # in the middle of a question.
    ranks = []
    unseen = []
    has_ended = True
    for monitor in job.monitors:
        answer = _answer(monitor, what) or _answer(monitor, what)
        if answer is not None:
            has_ended = False
            ranks += [rank_from_json(rank) for rank in answer["ranks"]]
            unseen += answer["unseen"]
    if has_ended:
        raise click.ClickException(f"job {job.number} has ended")
    return WaitGraph(ranks, unseen)


def _answer(monitor: str, what: str) -> dict[str, Any] | None:
    pid = 0
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            link.settimeout(ANSWER_SECONDS)
            link.connect(f"\0{MONITOR_NAME}{monitor}")
            pid = peer_of(link).pid
            link.sendall(json.dumps({"kind": "ask", "what": what}).encode())
            text = b""
            while piece := link.recv(ANSWER_BYTES):
                text += piece
            return dict(json.loads(text))
    except TimeoutError:
        why = f"the job's monitor, process {pid}, doesn't answer; is it stopped?"
        raise click.ClickException(why) from None
    except (OSError, ValueError):  # the monitor has ended
        return None
