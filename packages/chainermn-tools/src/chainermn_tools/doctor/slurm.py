"""The check of the job of Slurm in which the doctor runs."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from datetime import datetime

from chainermn_tools import jobs
from chainermn_tools.doctor.check import (
    CheckResult,
    Checks,
    Context,
    failed,
    ok,
    skipped,
    warning,
)

SHORT_SECONDS = 300  # less time than most jobs need
# States of nodes; those with a star don't answer.
BROKEN = re.compile(r"\*$|^(?:down|fail)")
ADDRESS = re.compile(r"[\d.]+")
ASK_SECONDS = 10.0

checks = Checks()


@checks.add("scheduler", "Does the scheduler grant what the ranks need?")
def scheduler(context: Context) -> CheckResult:
    granted: tuple[jobs.Host, ...] = ()
    try:
        _, granted = jobs.find_allocation(os.environ) or ("", ())
    except ValueError as error:
        if not context.hosts:
            return failed(str(error), "chainermn doctor --hosts HOST,HOST")
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return skipped("this is no job of Slurm")
    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    tasks = sum(host.slots or 1 for host in granted)
    message = f"Slurm's job {job} grants {tasks} tasks on {listed}"
    ranks = context.ranks or 1
    if tasks and ranks > tasks:
        hint = f"salloc -n {ranks}   # or sbatch"
        return failed(f"{message}; {ranks} ranks don't fit", hint)
    nodes = [host.name for host in granted]
    short = {node.split(".")[0] for node in nodes}  # either name may lack the domain
    outside = [
        host.name
        for host in context.hosts
        if host.name.split(".")[0] not in short and not ADDRESS.fullmatch(host.name)
    ]
    if nodes and outside:
        hint = f"name hosts of the job: {','.join(nodes)}"
        return failed(f"{message}, and not {', '.join(outside)}", hint)
    for line in _ask("sinfo", "-h", "-N", "-n", listed, "-o", "%N %T %E").splitlines():
        node, state, reason = line.split(maxsplit=2)
        if BROKEN.search(state):
            hint = f"sbatch --exclude={node} ...   # or ask: scontrol show node"
            return failed(f"{node} is {state} ({reason})", hint)
    with suppress(ValueError):  # the job may have no limit
        end = _ask("squeue", "-h", "-j", job, "-o", "%e").strip()
        left = int((datetime.fromisoformat(end) - datetime.now()).total_seconds())
        if left < SHORT_SECONDS:
            hint = f"sbatch --time=...   # or scontrol update JobId={job} TimeLimit=..."
            return warning(f"{message}, and ends in {left} s", hint)
    return ok(message)


def _ask(program: str, *words: str) -> str:
    """Return what a program of Slurm prints; nothing if the program fails or is missing."""
    with suppress(jobs.Unavailable):
        return jobs.check_output([program, *words], ASK_SECONDS)
    return ""
