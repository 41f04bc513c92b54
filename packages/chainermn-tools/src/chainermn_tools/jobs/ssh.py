"""How ssh is asked to log in to a host, as mpiexec does it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from chainermn_tools.jobs.hosts import HOST_NAME

# The variables that name mpiexec's ssh: of MPICH and its relatives, and then of Open MPI.
HYDRA_AGENTS = ("HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP_EXEC")
OPEN_MPI_AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm_ssh_agent")
OPTIONS = (
    *("-T", "-x"),
    "-v",  # even where a wrapper says -q it then says why it failed
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectionAttempts=1"),
)


def ssh_program(vendor: str | None) -> list[str]:
    """Return the words with which the mpiexec of this vendor would start ssh."""
    if vendor == "Open MPI":
        chosen = next(filter(None, map(os.environ.get, OPEN_MPI_AGENTS)), "ssh")
        return shlex.split(chosen.split(" : ")[0])  # it may list several to choose from
    return [next(filter(None, map(os.environ.get, HYDRA_AGENTS)), "ssh")]


def login_command(program: Sequence[str], host: str, command: str, timeout: float) -> list[str]:
    """Return the words that run a command in the host's login shell; refuse what is no name."""
    if not HOST_NAME.fullmatch(host):
        raise ValueError(f"{host!r} is no name of a host")
    limit = f"ConnectTimeout={max(1, int(timeout))}"
    return [*program, *OPTIONS, "-o", limit, "--", host, command]
