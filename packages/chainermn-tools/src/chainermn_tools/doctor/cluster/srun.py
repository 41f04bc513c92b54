"""Slurm's job in which this process is: its nodes, and how srun starts programs there."""

from __future__ import annotations

import os
import re
import shutil

from chainermn_tools import jobs
from chainermn_tools.jobs import Host

# What makes mpiexec start ranks by other means than srun.
OVERRULING = ("HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP", "PRTE_MCA_plm", "OMPI_MCA_plm")
# A step beside the job's own, on cores that they share. A Slurm that is too old ignores them.
BESIDE = {"SLURM_OVERLAP": "1", "SLURM_OVERCOMMIT": "1"}
ASK_SECONDS = 10.0


def granted_hosts() -> tuple[Host, ...]:
    """Return the nodes of this process's job and their numbers of tasks; none outside of a job."""
    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    names = ask("scontrol", "show", "hostnames", listed).split() if listed else []
    has_tasks = "SLURM_NTASKS" in os.environ  # else srun starts one a node
    counts = task_counts() if has_tasks else [1] * len(names)
    return tuple(Host(name, count) for name, count in zip(names, counts, strict=False))


def task_counts() -> list[int]:
    """Return the tasks of each node in Slurm's ``2(x3),1``; none where it doesn't say."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_TASKS_PER_NODE", ""))
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def ask(program: str, *words: str) -> str:
    """Return what a program of Slurm prints; nothing where it fails or is missing."""
    try:
        return jobs.check_output([program, *words], ASK_SECONDS)
    except jobs.Unavailable:
        return ""


def starts_ranks() -> bool:
    """Return whether mpiexec starts its ranks by srun, as within a job of Slurm."""
    chosen = any(os.environ.get(name) for name in OVERRULING)
    return "SLURM_JOB_ID" in os.environ and bool(shutil.which("srun")) and not chosen


def command(host: str, text: str) -> list[str]:
    """Return the words that run a command in a shell on a node of the job."""
    how = [*(f"{name}={value}" for name, value in BESIDE.items()), "srun", "--mpi=none"]
    return ["env", *how, "--nodes=1", "--ntasks=1", f"--nodelist={host}", "sh", "-c", text]
