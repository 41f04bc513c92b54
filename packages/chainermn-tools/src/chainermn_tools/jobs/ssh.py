"""How a command is run on a host, as mpiexec does it: by ssh, or in a job of Slurm by srun."""

from __future__ import annotations

import os
import shlex
import shutil

from chainermn_tools.jobs.hosts import HOST_NAME

# The variables that name mpiexec's ssh: of MPICH and its relatives, and then of Open
# MPI.
HYDRA_AGENTS = ("HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP_EXEC")
OPEN_MPI_AGENTS = (
    "PRTE_MCA_plm_ssh_agent",
    "OMPI_MCA_plm_rsh_agent",
    "OMPI_MCA_plm_ssh_agent",
)
# What makes mpiexec start ranks by other means than srun.
OVERRULING = ("HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP", "PRTE_MCA_plm", "OMPI_MCA_plm")
# A step beside the job's own, on cores that they share. A Slurm that is too old ignores
# them.
BESIDE = {"SLURM_OVERLAP": "1", "SLURM_OVERCOMMIT": "1"}
OPTIONS = (
    *("-T", "-x"),
    "-v",  # even where a wrapper says -q it then says why it failed
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectionAttempts=1"),
)


def _ssh_program(vendor: str | None) -> list[str]:
    """Return the words with which the mpiexec of this vendor would start ssh."""
    if vendor == "Open MPI":
        chosen = next(filter(None, map(os.environ.get, OPEN_MPI_AGENTS)), "ssh")
        return shlex.split(chosen.split(" : ")[0])  # it may list several to choose from
    return [next(filter(None, map(os.environ.get, HYDRA_AGENTS)), "ssh")]


def starts_by_srun() -> bool:
    """Return whether mpiexec starts its ranks by srun, as within a job of Slurm."""
    chosen = any(os.environ.get(name) for name in OVERRULING)
    return "SLURM_JOB_ID" in os.environ and bool(shutil.which("srun")) and not chosen


def remote_command(
    vendor: str | None, host: str, command: str, timeout: float
) -> list[str]:
    """Return the words that run a command in a shell on a host; refuse what is no name."""
    if not HOST_NAME.fullmatch(host):
        raise ValueError(f"{host!r} is no name of a host")
    if vendor == "Slurm" or starts_by_srun():
        how = [
            *(f"{name}={value}" for name, value in BESIDE.items()),
            "srun",
            "--mpi=none",
        ]
        return [
            "env",
            *how,
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={host}",
            "sh",
            "-c",
            command,
        ]
    limit = f"ConnectTimeout={max(1, int(timeout))}"
    return [*_ssh_program(vendor), *OPTIONS, "-o", limit, "--", host, command]
