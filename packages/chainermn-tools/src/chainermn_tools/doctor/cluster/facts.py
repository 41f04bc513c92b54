"""What this machine and all hosts say of themselves and one another; each is asked once."""

from __future__ import annotations

import ipaddress
import json
import math
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from chainermn_tools import environment, jobs
from chainermn_tools.doctor.check import CheckResult, Context, Run, skipped
from chainermn_tools.doctor.cluster import ssh
from chainermn_tools.doctor.cluster.session import (
    COMMAND,
    Session,
    first_input,
    open_sessions,
)
from chainermn_tools.doctor.software import launcher_if_any
from chainermn_tools.formatting import join_first
from chainermn_tools.jobs import Unavailable

# The name of this machine among the hosts; no host can have it.
THIS_MACHINE = "this machine"
# Logins at the same time: more would overload a gateway, a directory service or this
# machine.
MAX_LOGINS = 16
# For logins and all answers: usual seconds, share of the remaining time, and the most
# of it. The rest is for trying connections and for starting ranks.
ANSWER_TIME = (30.0, 0.25, 0.4)
LOGIN_TIME = (10.0, 0.1, 0.2)
VERSION_TIME = (5.0, 0.05, 0.2)  # of mpiexec when it is asked for its version
CONNECTIONS_TIME = (8.0, 0.1)
# A lost first packet is sent again after one second, and then after two more.
CONNECT_SECONDS = 3.5
MAX_ALL = 16  # hosts that all connect to one another
MAX_NAMED = 5
NOT_FOUND = 127  # of a shell's exit statuses
Evaluate = Callable[["Context", "ClusterFacts"], CheckResult]


@dataclass
class HostReply:
    """What came of asking one host."""

    facts: dict[str, Any] | None  # that the agent found; None when nothing came
    failure: ssh.SSHFailure | None = None  # why ssh failed
    no_python: str = ""  # why Python doesn't run there
    # For every other that this one tried to connect to, ``{"seconds": s}`` or
    # ``{"problem": text}``; None if it did not finish trying.
    reached: dict[str, dict[str, Any]] | None = None


@dataclass(frozen=True)
class ClusterFacts:
    """What this machine and the hosts said."""

    local: dict[str, Any]  # this machine's facts, from the same agent
    hosts: dict[str, HostReply]  # by name

    def facts(self) -> dict[str, dict[str, Any]]:
        return {
            name: one.facts for name, one in self.hosts.items() if one.facts is not None
        }

    def facts_with_same_python(self) -> dict[str, dict[str, Any]]:
        wanted = self.local["python"]
        return {
            name: one for name, one in self.facts().items() if one["python"] == wanted
        }


def over_hosts(evaluate: Evaluate) -> Run:
    """Make a check's function of one that takes the facts, too; it is skipped without hosts."""

    def run(context: Context) -> CheckResult:
        if not context.hosts:
            return skipped("no hosts were named")
        return evaluate(context, gather_facts(context))

    return run


@Context.cached
def gather_facts(context: Context) -> ClusterFacts:
    """Ask this machine and all hosts, and let them try connections among one another."""
    launcher = launcher_if_any(context)
    order = {
        "seconds": int(context.remaining()) + 1,
        "token": secrets.token_hex(8),
        "packages": [*environment.OUR_PACKAGES, *environment.OTHER_PACKAGES],
        "families": environment.PACKAGE_FAMILIES,
        "script": context.script,
        "mpiexec": launcher.get("path"),
        "program_seconds": context.time_for(*VERSION_TIME),
    }
    lines = first_input(sys.executable, order)
    vendor, login_time = launcher.get("vendor"), context.time_for(*LOGIN_TIME)
    commands = {THIS_MACHINE: ["sh", "-c", COMMAND]}
    for host in context.hosts:
        commands[host.name] = jobs.remote_command(
            vendor, host.name, COMMAND, login_time
        )
    with open_sessions() as start:
        seconds = context.time_for(*ANSWER_TIME)
        deadline = time.monotonic() + seconds
        started = _log_in(commands, start, lines, seconds)
        replies = {name: _receive_reply(one, deadline) for name, one in started.items()}
        local = replies.pop(THIS_MACHINE)
        if local.facts is None:
            raise Unavailable(f"{sys.executable} can't be asked as hosts are: {local}")
        found = ClusterFacts(local.facts, replies)
        sessions = {
            name: one for name, one in started.items() if isinstance(one, Session)
        }
        _try_connections(sessions, found, context.time_for(*CONNECTIONS_TIME))
    return found


def _log_in(
    commands: Mapping[str, Sequence[str]],
    start: Callable[[Sequence[str]], Session],
    lines: bytes,
    seconds: float,
) -> dict[str, Session | ssh.SSHFailure]:
    """Start a session with each host and send it the agent, a limited number at the same time.

    All must be started within the seconds, whichever hang: a login that takes longer
    than its share no longer counts.
    """
    share = seconds / (1 + math.ceil(len(commands) / MAX_LOGINS))
    slots = threading.Semaphore(MAX_LOGINS)

    def log_in(command: Sequence[str]) -> Session | ssh.SSHFailure:
        with slots:
            try:
                session = start(command)
            except OSError as error:
                said = f"{command[0]} doesn't start: {error.strerror}"
                return ssh.SSHFailure(
                    "no ssh", "ssh can't be started here", ssh.NO_SSH, said
                )
            session.send(lines)
            session.answered.wait(share)
            return session

    logins = {name: partial(log_in, command) for name, command in commands.items()}
    return environment.run_concurrently(logins, threading.TIMEOUT_MAX)


def _receive_reply(session: Session | ssh.SSHFailure, deadline: float) -> HostReply:
    if isinstance(session, ssh.SSHFailure):
        return HostReply(None, session)
    answer = session.receive(deadline)
    if answer is None:
        failure = ssh.classify_failure(session.stderr)
        if not failure.said:
            waited = time.monotonic() - session.started
            failure = failure._replace(said=f"nothing within {waited:.0f} s")
        return HostReply(None, failure)
    if "python" in answer:
        return HostReply(answer)
    # A shell ends after its answer; then its stderr has been read.
    session.receive(deadline)
    if answer["status"] == NOT_FOUND:
        return HostReply(None, no_python=f"there is no {sys.executable}")
    said = ssh.without_verbose_lines(session.stderr)
    message = f"{sys.executable} doesn't run (exit status {answer['status']}): {said}"
    return HostReply(None, no_python=message)


def _try_connections(
    sessions: Mapping[str, Session], found: ClusterFacts, seconds: float
) -> None:
    """Let each host connect to others and to this machine; add to its reply what it found."""
    deadline = time.monotonic() + seconds
    hosts = found.facts()
    expected = {}
    for asker in hosts:
        others: dict[str, list[Any]] = {}
        for other in [THIS_MACHINE, *partners(asker, list(hosts))]:
            facts = hosts.get(other, found.local)
            where = address_of(other, asker, hosts)
            if where is not None and facts["machine"] != hosts[asker]["machine"]:
                others[other] = [where, facts["port"]]
        order = {"connect": others, "seconds": min(CONNECT_SECONDS, seconds)}
        sessions[asker].send(f"{json.dumps(order)}\n".encode())
        expected[asker] = others.keys()
    for asker in hosts:
        reached = sessions[asker].receive(deadline)
        # A Python that ends in the middle of it is followed by what its shell says.
        if reached is not None and reached.keys() == expected[asker]:
            found.hosts[asker].reached = reached


def partners(asker: str, hosts: Sequence[str]) -> list[str]:
    """Return whom a host connects to: all others, or of many those 1, 2, 4, ... places on."""
    count, place = len(hosts), hosts.index(asker)
    steps = [1 << bit for bit in range((count - 1).bit_length())]
    return [
        hosts[(place + one) % count]
        for one in (steps, range(1, count))[count <= MAX_ALL]
    ]


def address_of(
    other: str, asker: str, facts: Mapping[str, dict[str, Any]]
) -> str | None:
    """Return where the asker finds another: by ssh's addresses, or in Slurm by its name."""
    if jobs.starts_by_srun():
        return socket.gethostname() if other == THIS_MACHINE else other
    here, _ = _ssh_addresses(facts[asker])
    if other == THIS_MACHINE:
        return here
    _, server = _ssh_addresses(facts[other])
    if server is not None and ipaddress.ip_address(server).is_loopback:
        return here  # ssh went from this machine to itself
    return server


def _ssh_addresses(facts: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the addresses of ssh's client and server."""
    words = facts["variables"].get("SSH_CONNECTION", "").replace("%", " ").split()
    try:
        client, _, server, _ = words
        # Whatever a host says, nothing else is connected to, or shown in a command.
        return str(ipaddress.ip_address(client)), str(ipaddress.ip_address(server))
    except ValueError:
        return None, None


def join_names(names: Sequence[str]) -> str:
    """Join names with commas, the last with "and"; shorten the list where there are many."""
    shown = list(names[:MAX_NAMED])
    if len(names) > MAX_NAMED:
        shown.append(f"{len(names) - MAX_NAMED} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def describe_problems(problems: Mapping[str, str]) -> str:
    """Describe what is wrong with which hosts, those with the same problem together."""
    hosts: dict[str, list[str]] = {}
    for host, problem in problems.items():
        hosts.setdefault(problem, []).append(host)
    parts = [f"{join_names(names)}: {problem}" for problem, names in hosts.items()]
    return join_first(parts, MAX_NAMED, "; ")


def subject_of(names: Sequence[str]) -> str:
    """Return the subject of a sentence about hosts that have no problem."""
    if len(names) == 1:
        return names[0]
    return "both hosts" if len(names) == 2 else f"all {len(names)} hosts"
