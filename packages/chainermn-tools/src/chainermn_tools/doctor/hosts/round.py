"""One round of questions: this machine and all hosts are asked side by side, each once.

`context.once(ask)` gives it to all checks of the layer.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chainermn_tools import jobs
from chainermn_tools.doctor import facts
from chainermn_tools.doctor.check import Answer, Check, Context, skipped
from chainermn_tools.doctor.hosts import bootstrap, ssh
from chainermn_tools.doctor.hosts.conversation import Conversation, conversations
from chainermn_tools.environment import packages

# The name of this machine among the hosts; no host can have it.
HERE = ""
# Of the time that there is: for a login and all answers; what is left is for trying connections
# and for starting ranks.
ANSWER_SHARE = 0.4
MOST_ANSWER_SECONDS = 30.0
MOST_LOGIN_SECONDS = 10.0
MOST_PROGRAM_SECONDS = 5.0  # of mpiexec when it is asked for its version
# A lost first packet is sent again after one second, and then after two more.
CONNECT_SECONDS = 3.5
# Connections are tried several times, and to many hosts in turns.
REACH_SECONDS = 8.0


@dataclass(frozen=True)
class Reply:
    """What came of asking one host.

    Attributes:
        facts: of the program in remote.py, or of a shell where there is no Python; None when
            nothing came.
        trouble: why nothing came; None otherwise.
        reached: for every other that this one tried to connect to, ``{"seconds": s}`` or
            ``{"problem": text}``; None if it did not come to the end of trying.
    """

    facts: dict[str, Any] | None
    trouble: ssh.Trouble | None = None
    reached: dict[str, dict[str, Any]] | None = None


@dataclass(frozen=True)
class Round:
    """What this machine and the hosts said.

    Attributes:
        here: this machine's facts, from the same program.
        hosts: the replies of the hosts, by name.
    """

    here: dict[str, Any]
    hosts: dict[str, Reply]

    def facts(self) -> dict[str, dict[str, Any]]:
        """The facts of the hosts that answered, by name."""
        return {name: one.facts for name, one in self.hosts.items() if one.facts is not None}

    def with_python(self) -> dict[str, dict[str, Any]]:
        """Of these, those of hosts where the Python is that of this machine."""
        wanted = self.here["python"]
        return {name: one for name, one in self.facts().items() if one["python"] == wanted}


def ask(context: Context) -> Round:
    """Ask this machine and all hosts, and let them try connections among one another.

    Raises:
        Unavailable: this machine itself doesn't answer.
    """
    mpiexec = launcher(context)
    left = context.left()
    until = time.monotonic() + min(ANSWER_SHARE * left, MOST_ANSWER_SECONDS)
    commands = _commands(context, ssh.agent(mpiexec.get("vendor")), ANSWER_SHARE * left / 2)
    job = {
        "seconds": int(left) + 1,
        "token": secrets.token_hex(8),
        "packages": [*packages.OURS, *packages.OTHERS],
        "families": packages.FAMILIES,
        "mpiexec": mpiexec.get("path"),
        "program_seconds": min(MOST_PROGRAM_SECONDS, ANSWER_SHARE * left / 2),
    }
    script = None if context.script is None else os.path.abspath(context.script)
    lines = bootstrap.first_lines(sys.executable, script, job)
    with conversations() as start:
        talks: dict[str, Conversation] = {}
        replies: dict[str, Reply] = {}
        for name, command in commands.items():
            try:
                talks[name] = start(command)
            except OSError as problem:  # noqa: PERF203
                said = f"{command[0]} doesn't start: {problem.strerror}"
                replies[name] = Reply(None, ssh.Trouble("no ssh", said))
        for talk in talks.values():
            talk.tell(lines)
        replies.update((name, _answer(talk, until)) for name, talk in talks.items())
        here = replies.pop(HERE)
        if here.facts is None or here.facts["python"] is None:
            raise jobs.Unavailable(f"{sys.executable} can't be asked as hosts are: {here}")
        answered = {name: one.facts for name, one in replies.items() if one.facts is not None}
        able = {name: one for name, one in {HERE: here.facts, **answered}.items() if "port" in one}
        reached = _try_connections(talks, able, min(REACH_SECONDS, context.left()))
    return Round(
        here.facts,
        {name: Reply(one.facts, one.trouble, reached.get(name)) for name, one in replies.items()},
    )


def _commands(context: Context, agent: Sequence[str], seconds: float) -> dict[str, list[str]]:
    """What is to be run for this machine and each host."""
    limit = min(MOST_LOGIN_SECONDS, seconds)
    return {
        HERE: ["sh", "-c", bootstrap.COMMAND],
        **{
            host.name: ssh.command(agent, host.name, bootstrap.COMMAND, limit)
            for host in context.hosts
        },
    }


def over_hosts(
    name: str, question: str, needs: tuple[str, ...] = ()
) -> Callable[[Callable[[Context, Round], Answer]], Check]:
    """Make a check of a function of the context and the round; skipped without hosts."""

    def make(look: Callable[[Context, Round], Answer]) -> Check:
        def guarded(context: Context) -> Answer:
            if not context.hosts:
                return skipped("no hosts were named")
            return look(context, context.once(ask))

        return Check(name, question, guarded, needs)

    return make


def launcher(context: Context) -> dict[str, Any]:
    """The ``mpiexec`` on PATH; empty without one, which is another check's business."""
    try:
        found: dict[str, Any] = context.once(facts.launcher)
    except jobs.Unavailable:
        return {}
    return found


def _answer(talk: Conversation, until: float) -> Reply:
    answer = talk.hear(until)
    if answer is None:
        trouble = ssh.trouble(talk.complaints())
        if not trouble.said:
            trouble = replace(trouble, said=f"nothing within {time.monotonic() - talk.began:.0f} s")
        return Reply(None, trouble)
    if "python" in answer:
        return Reply(answer)
    return Reply({**bootstrap.without_python(answer), "said": ssh.plain(talk.complaints())})


def _try_connections(
    talks: Mapping[str, Conversation], able: Mapping[str, dict[str, Any]], seconds: float
) -> dict[str, dict[str, Any]]:
    """Let each host connect to all others and to this machine; what each found."""
    until = time.monotonic() + seconds
    orders: dict[str, dict[str, list[Any]]] = {name: {} for name in able if name != HERE}
    for asker, others in orders.items():
        for other, facts_of in able.items():
            where = address(other, asker, able)
            if where is not None and facts_of["machine"] != able[asker]["machine"]:
                others[other] = [where, facts_of["port"]]
        order = {"connect": others, "seconds": min(CONNECT_SECONDS, seconds)}
        talks[asker].tell(json.dumps(order) + "\n")
    answers = {asker: talks[asker].hear(until) for asker in orders}
    return {
        asker: answer
        for asker, answer in answers.items()
        # A Python that ends in the middle of it is followed by what its shell says.
        if answer is not None and answer.keys() == orders[asker].keys()
    }


def address(other: str, asker: str, able: Mapping[str, dict[str, Any]]) -> str | None:
    """Where one finds another: ssh's connections say by which addresses the hosts are known."""
    if other == HERE:
        return _connection(able[asker])[0]
    server = _connection(able[other])[1]
    if server is not None and ipaddress.ip_address(server).is_loopback:
        return address(HERE, asker, able)  # ssh went from this machine to itself
    return server


def _connection(said: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The addresses of ssh's client and server."""
    words = said["variables"].get("SSH_CONNECTION", "").replace("%", " ").split()
    try:
        client, _, server, _ = words
        # Whatever a host says, nothing else is connected to, or shown in a command.
        return str(ipaddress.ip_address(client)), str(ipaddress.ip_address(server))
    except ValueError:
        return None, None
