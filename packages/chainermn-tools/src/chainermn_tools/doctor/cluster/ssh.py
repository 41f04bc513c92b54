"""How ssh is asked to log in to a host, and what it means when it fails."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from chainermn_tools.jobs import HOST_NAME

# The variables that name mpiexec's ssh: of MPICH and its relatives, and then of Open MPI.
HYDRA_AGENTS = ("HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP_EXEC")
OPEN_MPI_AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm_ssh_agent")
OPTIONS = (
    *("-T", "-x"),
    "-v",  # even where a wrapper says -q it then says why it failed, and which keys it offered
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectionAttempts=1"),
)
OFFERED = re.compile(r"^debug1: Offering public key", re.MULTILINE)
LOGGED_IN = re.compile(r"^(?:debug1: )?Authenticated to ", re.MULTILINE)
# What -v adds: its own lines, and the banner of a version. And what is no failure.
VERBOSE_LINE = re.compile(
    r"debug\d: |OpenSSH_|Authenticated to |Transferred: |Bytes per second: "
    r"|Warning: Permanently added "
)
QUOTED_CHARACTERS = 300
IF_SLOW = "if it is just slow, give it more time with --timeout"


class FailureKind(NamedTuple):
    """A way in which a login can fail."""

    name: str  # what JSON calls it
    message: str  # what is wrong
    hint: str  # what to do about it, with ``{host}`` for the host's name
    pattern: str | None = None  # what ssh prints; None for a kind that is recognised otherwise
    check: str = "ssh"  # the name of the check that reports it


# Most specific first.
FAILURE_KINDS = (
    FailureKind(
        "unknown name",
        "nobody knows this name",
        "write the host's address, or add a line to /etc/hosts: ADDRESS {host}",
        r"could not resolve hostname|name or service not known",
        "host names",
    ),
    FailureKind(
        "changed host key",
        "its key is not the one that ssh knows",
        "ssh-keygen -R {host}   # if the host was installed anew, and else find out who answers",
        r"remote host identification has changed|host key for .* has changed",
        "host keys",
    ),
    FailureKind(
        "unknown host key",
        "ssh doesn't know its key yet, and would ask",
        "ssh {host}   # once, and answer yes if the fingerprint is right",
        r"host key verification failed|no .* host key is known for",
        "host keys",
    ),
    FailureKind(
        "refused key",
        "it takes none of the keys that ssh offers",
        "ssh-copy-id {host}",
        r"permission denied \(|too many authentication failures",
    ),
    FailureKind(
        "refused",
        "it refuses the connection: no ssh server listens there",
        "sudo systemctl start ssh   # on {host}; or put its port into ~/.ssh/config",
        r"connection refused",
    ),
    FailureKind(
        "unreachable",
        "there is no way to it, or it is down",
        "ping {host}   # and see that the host runs, and that no firewall drops port 22",
        r"timed out|no route to host|network is unreachable"
        r"|connect to host .*(?:permission denied|operation not permitted)",  # a firewall here
    ),
    FailureKind(
        "closed",
        "its ssh server closes the connection before the login",
        "sudo journalctl -u ssh   # on {host}, which says why: MaxStartups, a blocked address",
        r"connection closed by|connection reset by|kex_exchange_identification",
    ),
    FailureKind(
        "no key",
        "it wants a key, and ssh has none to offer",
        "ssh-keygen -t ed25519 && ssh-copy-id {host}",
    ),
    FailureKind(
        "no answer",
        "ssh gets no answer in time",
        f"ssh -v {{host}} true   # shows where it waits; {IF_SLOW}",
    ),
    FailureKind(
        "no shell",
        "the login succeeds, but what runs there gives no answer in time",
        "ssh {host} true   # if it doesn't end, see ~/.bashrc there and what it waits for; "
        + IF_SLOW,
    ),
    FailureKind(
        "no ssh",
        "ssh can't be started here",
        "sudo apt-get install openssh-client   # or what HYDRA_LAUNCHER_EXEC names",
    ),
)
KINDS = {kind.name: kind for kind in FAILURE_KINDS}


class SSHFailure(NamedTuple):
    """Why a host gave no answer: a kind's name, and what was said, on one line, if anything."""

    kind: str
    message: str


def program(vendor: str | None) -> list[str]:
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


def classify_failure(stderr: str) -> SSHFailure:
    """Return what made ssh fail, from what it wrote to standard error under ``-v``."""
    message = without_verbose_lines(stderr)
    if LOGGED_IN.search(stderr):
        return SSHFailure("no shell", message)
    for kind in FAILURE_KINDS:
        if kind.pattern and re.search(kind.pattern, message, re.IGNORECASE):
            if kind.name == "refused key" and not OFFERED.search(stderr):
                return SSHFailure("no key", message)
            return SSHFailure(kind.name, message)
    return SSHFailure("no answer", message)


def without_verbose_lines(stderr: str) -> str:
    """Return what ``-v`` did not add, on one line, the end of it if it is long."""
    lines = [line for line in stderr.splitlines() if not VERBOSE_LINE.match(line)]
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= QUOTED_CHARACTERS else f"... {text[-QUOTED_CHARACTERS:]}"
