"""The hosts, and their ranks, that a scheduler gives to this process's job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from chainermn_tools.jobs.hosts import Host, parse_hostfile
from chainermn_tools.jobs.process import Unavailable, check_output
from chainermn_tools.threads import expand_counts

SCONTROL_SECONDS = 20.0
# The variables that name a job's hostfile. In jobs of other schedulers mpiexec finds
# the hosts.
HOSTFILES = {"PBS": "PBS_NODEFILE", "LSF": "LSB_DJOB_RANKFILE"}


def find_allocation(env: Mapping[str, str]) -> tuple[str, tuple[Host, ...]] | None:
    """Return the scheduler, and its job's hosts in its order; None outside of a job.

    Raise ValueError if the scheduler's variables, or a file that they name, can't be
    read.
    """
    try:
        if env.get("SLURM_JOB_NODELIST"):
            return "Slurm", _hosts_of_slurm(env)
        for scheduler, variable in HOSTFILES.items():
            if env.get(variable):
                text = Path(env[variable]).read_text()
                return scheduler, parse_hostfile(text, variable)
    except (OSError, ValueError, Unavailable) as error:
        message = f"the scheduler's hosts can't be read: {error}; give --hosts"
        raise ValueError(message) from None
    return None


def _hosts_of_slurm(env: Mapping[str, str]) -> tuple[Host, ...]:
    command = ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]]
    lines = check_output(command, SCONTROL_SECONDS).split()
    # Without the variable srun starts one task a node, and the other tasks are cores.
    if "SLURM_NTASKS" in env:
        counts = expand_counts(env.get("SLURM_TASKS_PER_NODE", ""))
        pairs = zip(lines, counts, strict=True)
        lines = [f"{name}:{count}" for name, count in pairs]
    return parse_hostfile("\n".join(lines), "SLURM_JOB_NODELIST")
