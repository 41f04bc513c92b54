"""What it means when ssh fails to log in to a host."""

from __future__ import annotations

import re
from typing import NamedTuple

from chainermn_tools.explain import root_cause
from chainermn_tools.jobs import starts_by_srun

LOGGED_IN = re.compile(r"^(?:debug1: )?Authenticated to ", re.MULTILINE)
# What -v adds: its own lines, and the banner of a version. And what is no failure.
VERBOSE_LINE = re.compile(
    r"debug\d: |OpenSSH_|Authenticated to |Transferred: |Bytes per second: "
    r"|Warning: Permanently added "
)
QUOTED_CHARACTERS = 300
NO_SSH = "sudo apt-get install openssh-client   # or what HYDRA_LAUNCHER_EXEC names"
IF_SLOW = "if it is just slow, give it more time with --timeout"
# In hints, the place of the host's name, as in those of explain.
HOST = "host1"


class SSHFailure(NamedTuple):
    """Why a host gave no answer."""

    kind: str  # what JSON calls it: a name of explain's rules, or another
    problem: str  # a sentence without its full stop
    hint: str  # what to do about it, with HOST for the host's name
    said: str  # on one line, if anything was said


def classify_failure(stderr: str) -> SSHFailure:
    """Return what made ssh fail, from what it wrote to standard error under ``-v``."""
    said = without_verbose_lines(stderr)
    if starts_by_srun():
        hint = f"srun --overlap -N 1 -n 1 -w {HOST} true   # shows why; {IF_SLOW}"
        return SSHFailure("srun", "srun starts nothing there", hint, said)
    if LOGGED_IN.search(stderr):
        problem = "the login succeeds, but what runs there gives no answer in time"
        hint = f"ssh {HOST} true   # if it doesn't end, see ~/.bashrc there and what it waits for"
        return SSHFailure("no shell", problem, f"{hint}; {IF_SLOW}", said)
    match = root_cause(said.encode())
    if match is not None and match.rule.component == "ssh":
        rule = match.rule
        return SSHFailure(rule.name, rule.meaning.removesuffix("."), rule.fix[0], said)
    hint = f"ssh -v {HOST} true   # shows where it waits; {IF_SLOW}"
    return SSHFailure("no answer", "ssh gets no answer in time", hint, said)


def without_verbose_lines(stderr: str) -> str:
    """Return what ``-v`` did not add, on one line, the end of it if it is long."""
    lines = [line for line in stderr.splitlines() if not VERBOSE_LINE.match(line)]
    text = " ".join(" ".join(lines).split())
    return (
        text if len(text) <= QUOTED_CHARACTERS else f"... {text[-QUOTED_CHARACTERS:]}"
    )
