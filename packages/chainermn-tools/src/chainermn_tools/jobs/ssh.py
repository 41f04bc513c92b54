"""How a command is run on a host, as mpiexec does it: by ssh, or in a job of Slurm by srun."""

from __future__ import annotations

import os
import shlex
import shutil

from chainermn_tools.jobs.hosts import HOST_NAME

# The variables that name mpiexec's ssh, for MPICH and its relatives, and for Open MPI,
# whose variables may list several.
HYDRA_AGENT = "HYDRA_LAUNCHER_EXEC"
OPEN_MPI_AGENT = "PRTE_MCA_plm_ssh_agent"
# Variables that make mpiexec start ranks by other means than srun.
OVERRULING = ("HYDRA_LAUNCHER", "PRTE_MCA_plm")
# A step beside the job's own, on cores that they share. A Slurm that is too old ignores
# them.
BESIDE = {"SLURM_OVERLAP": "1", "SLURM_OVERCOMMIT": "1"}
# Even if a wrapper says -q, with -v ssh says why it failed.
SSH_OPTIONS = ["-T", "-x", "-v", "-o", "BatchMode=yes", "-o", "ConnectionAttempts=1"]
SRUN = ["srun", "--mpi=none", "--overlap", "--overcommit", "--nodes=1", "--ntasks=1"]


def starts_by_srun() -> bool:
    """Return whether mpiexec starts its ranks by srun, as within a job of Slurm."""
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        return False
    return not any(map(os.environ.get, OVERRULING))


def remote_command(
    vendor: str | None, host: str, command: str, timeout: float
) -> list[str]:
    """Return the words that run a command in a shell on a host; refuse malformed names."""
    if not HOST_NAME.fullmatch(host):
        raise ValueError(f"{host!r} is no name of a host")
    if starts_by_srun():
        return [*SRUN, f"--nodelist={host}", "sh", "-c", command]
    if vendor == "Open MPI":
        agents = os.environ.get(OPEN_MPI_AGENT, "ssh")
        ssh = shlex.split(agents.partition(" : ")[0])
    else:
        ssh = [os.environ.get(HYDRA_AGENT, "ssh")]
    limit = f"ConnectTimeout={max(1, int(timeout))}"
    return [*ssh, *SSH_OPTIONS, "-o", limit, "--", host, command]
