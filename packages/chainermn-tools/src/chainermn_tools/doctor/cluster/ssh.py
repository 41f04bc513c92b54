"""The ssh that mpiexec would use: its command, and what its failures mean."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from chainermn_tools.jobs import HOST_NAME

# Where users tell mpiexec which ssh to take, MPICH and its relatives and then Open MPI.
HYDRA_AGENTS = ("HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP_EXEC")
OPEN_MPI_AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm_ssh_agent")
OPTIONS = (
    *("-T", "-x"),
    "-v",  # even where a wrapper says -q it then says why it failed, and which keys it offered
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectionAttempts=1"),
)
FailureKind = Literal[
    "unknown name",
    "unreachable",
    "refused",
    "closed",
    "unknown host key",
    "changed host key",
    "no key",
    "refused key",
    "no answer",
    "no shell",
    "no ssh",
]
# What ssh prints, most telling first.
STDERR_PATTERNS: tuple[tuple[FailureKind, str], ...] = (
    ("unknown name", r"could not resolve hostname|name or service not known"),
    ("changed host key", r"remote host identification has changed|host key for .* has changed"),
    ("unknown host key", r"host key verification failed|no .* host key is known for"),
    ("refused key", r"permission denied \(|too many authentication failures"),
    ("refused", r"connection refused"),
    (
        "unreachable",
        r"timed out|no route to host|network is unreachable"
        r"|connect to host .*(?:permission denied|operation not permitted)",  # a firewall here
    ),
    ("closed", r"connection closed by|connection reset by|kex_exchange_identification"),
)
OFFERED = re.compile(r"^debug1: Offering public key", re.MULTILINE)
LOGGED_IN = re.compile(r"^(?:debug1: )?Authenticated to ", re.MULTILINE)
# What -v adds: its own lines, and the banner of a version. And what is no failure.
VERBOSE_LINE = re.compile(
    r"debug\d: |OpenSSH_|Authenticated to |Transferred: |Bytes per second: "
    r"|Warning: Permanently added "
)
QUOTED_CHARACTERS = 300


@dataclass(frozen=True)
class SSHFailure:
    """Why a host gave no answer.

    Attributes:
        kind: "no shell" means that the login succeeded, and then nothing came.
        message: of ssh or of the host, on one line; may be empty.
    """

    kind: FailureKind
    message: str


def ssh_program(vendor: str | None) -> list[str]:
    """Return the words with which the mpiexec of this vendor would start ssh."""
    if vendor == "Open MPI":
        chosen = next(filter(None, map(os.environ.get, OPEN_MPI_AGENTS)), "ssh")
        return shlex.split(chosen.split(" : ")[0])  # it may list several to choose from
    return [next(filter(None, map(os.environ.get, HYDRA_AGENTS)), "ssh")]


def ssh_command(program: Sequence[str], host: str, command: str, timeout: float) -> list[str]:
    """Return the words that run a command on a host.

    Args:
        program: as :func:`ssh_program` returns it.
        host: its name.
        command: for the host's login shell, as it stands.
        timeout: that connecting may take, in seconds.

    Raises:
        ValueError: this is no name of a host.
    """
    if not HOST_NAME.fullmatch(host):
        raise ValueError(f"{host!r} is no name of a host")
    limit = f"ConnectTimeout={max(1, int(timeout))}"
    return [*program, *OPTIONS, "-o", limit, "--", host, command]


def classify_failure(stderr: str) -> SSHFailure:
    """Return what made ssh fail, from what it wrote to standard error under ``-v``."""
    message = without_verbose_lines(stderr)
    if LOGGED_IN.search(stderr):
        return SSHFailure("no shell", message)
    for kind, pattern in STDERR_PATTERNS:
        if re.search(pattern, message, re.IGNORECASE):
            if kind == "refused key" and not OFFERED.search(stderr):
                return SSHFailure("no key", message)
            return SSHFailure(kind, message)
    return SSHFailure("no answer", message)


def without_verbose_lines(stderr: str) -> str:
    """Return what ``-v`` did not add, on one line, the end of it if it is long."""
    lines = [line for line in stderr.splitlines() if not VERBOSE_LINE.match(line)]
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= QUOTED_CHARACTERS else f"... {text[-QUOTED_CHARACTERS:]}"
