"""Slurm's job in which this process is: its nodes, and how srun starts programs there."""

from __future__ import annotations

import os
import shutil

from chainermn_tools import jobs

# What makes mpiexec start ranks by other means than srun.
OVERRULING = ("HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP", "PRTE_MCA_plm", "OMPI_MCA_plm")
# A step beside the job's own, on cores that they share. A Slurm that is too old ignores them.
BESIDE = {"SLURM_OVERLAP": "1", "SLURM_OVERCOMMIT": "1"}
ASK_SECONDS = 10.0


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
