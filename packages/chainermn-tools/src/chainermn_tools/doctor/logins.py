"""The answers of the hosts when they are asked one by one, by ssh or by Slurm's srun."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from chainermn_tools import jobs
from chainermn_tools.doctor.check import Context
from chainermn_tools.doctor.hints import most_telling_line
from chainermn_tools.explain import root_cause

# Logins at the same time. More would overload a gateway, a directory service or this
# machine.
MAX_LOGINS = 16
# The share of the remaining time that all logins together may take.
SHARE = 0.3
# The name of this machine among the hosts; no host can have it.
THIS_MACHINE = "this machine"
# For a login shell, which may be csh or fish, to which nothing here is special. The
# script comes over standard input.
COMMAND = "exec sh -s"
MARK = "chainermn-doctor:"  # start-up files of shells print things, too
SCRIPT = """\
{python} -c {code} {script}
status=$?
[ $status = 0 ] || printf '\\n{mark}{{"status": %d}}\\n' $status
"""
# For any version of Python that a host has.
CODE = """\
import hashlib, json, platform, sys
found = {"host": platform.node(), "version": platform.python_version()}
found["implementation"] = platform.python_implementation()
try:
    if sys.argv[1]:
        with open(sys.argv[1], "rb") as file:
            found["script"] = hashlib.sha256(file.read()).hexdigest()
except (IOError, OSError) as error:
    found["no script"] = error.strerror
print("\\n%s" + json.dumps(found))
""".replace("%s", MARK)
# Lines that -v adds, the banner of a version, and lines that report no failure.
VERBOSE_LINE = re.compile(
    r"debug\d: |OpenSSH_|Authenticated to |Transferred: |Bytes per second: "
    r"|Warning: Permanently added "
)
LOGGED_IN = re.compile(r"^(?:debug1: )?Authenticated to ", re.MULTILINE)
QUOTED_CHARACTERS = 300
# The placeholder for the host's name in the hints of explain's rules.
HOST = "host1"


@dataclass(frozen=True)
class Login:
    """The result of asking one host."""

    # What CODE printed on the host; only a shell's ``status`` if Python doesn't run.
    answer: dict[str, Any] = field(default_factory=dict)
    problem: str = ""  # why there is no answer
    hint: str = ""  # the remedy
    said: str = ""  # the host's standard error, without the lines that -v adds


@functools.cache
def ask_all(context: Context) -> dict[str, Login]:
    """Ask this machine and all hosts, a limited number at the same time."""
    names = [THIS_MACHINE, *(host.name for host in context.hosts)]
    timeout = context.share(SHARE) / math.ceil(len(names) / MAX_LOGINS)
    vendor = context.facts["mpi"]["launcher"].get("vendor")
    script = SCRIPT.format(
        python=shlex.quote(sys.executable),
        code=shlex.quote(CODE),
        script=shlex.quote(context.script or ""),
        mark=MARK,
    )

    def ask(name: str) -> Login:
        command = ["sh", "-c", COMMAND]
        if name != THIS_MACHINE and not jobs.is_here(name):
            command = jobs.remote_command(vendor, name, COMMAND, timeout)
        if shutil.which(command[0]) is None:
            problem = f"there is no {command[0]} on PATH"
            return Login(
                problem=problem, hint="sudo apt-get install openssh-client   # here"
            )
        return _ask(name, command, os.fsencode(script), timeout)

    with concurrent.futures.ThreadPoolExecutor(MAX_LOGINS) as pool:
        return dict(zip(names, pool.map(ask, names), strict=True))


def _ask(name: str, command: list[str], script: bytes, timeout: float) -> Login:
    """Run the script in a shell on a host."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with jobs.running(command, **pipes) as process:
        try:
            output, errors = process.communicate(script, timeout)
        except subprocess.TimeoutExpired as late:
            output = late.stdout or b""
            errors = late.stderr or b""
    text = errors.decode(errors="replace")
    lines = [one for one in text.splitlines() if not VERBOSE_LINE.match(one)]
    said = " ".join(lines)[-QUOTED_CHARACTERS:]
    for line in output.decode(errors="replace").splitlines():
        if line.startswith(MARK):
            with contextlib.suppress(ValueError):
                return Login(answer=json.loads(line.removeprefix(MARK)), said=said)
    problem, hint = _explain(text, said)
    return Login(problem=problem, hint=hint.replace(HOST, name))


def _explain(text: str, said: str) -> tuple[str, str]:
    """Return why a host gave no answer, and the remedy."""
    more = "if it is just slow, give it more time with --timeout"
    if jobs.starts_by_srun():
        hint = f"srun --overlap -N 1 -n 1 -w {HOST} true   # shows why; {more}"
        return f"srun starts nothing there{jobs.quote_output(said)}", hint
    if LOGGED_IN.search(text):
        hint = f"ssh {HOST} true   # if it doesn't end, see ~/.bashrc there; {more}"
        problem = "the login succeeds, but no program runs there in time"
        return f"{problem}{jobs.quote_output(said)}", hint
    match = root_cause(said.encode())
    if match is not None and match.rule.component == "ssh":
        return match.rule.meaning.removesuffix("."), match.rule.fix[0]
    hint = f"ssh -v {HOST} true   # shows where it waits; {more}"
    if not said:
        return "ssh gets no answer in time", hint
    return f"ssh fails: {most_telling_line(said)}", hint
