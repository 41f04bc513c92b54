"""Runs a program to its end or to a time limit, and collects its output."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from subprocess import CompletedProcess
from typing import Any

from chainermn_tools.jobs.signals import SIGNAL_NAMES
from chainermn_tools.jobs.supervisor import BoundedOutput, Request, supervise
from chainermn_tools.jobs.tags import TAG_VARIABLE

# Characters of a failed command's output that are quoted: a launcher says what is wrong
# first, a Python traceback last.
QUOTED_FIRST, QUOTED_LAST = 200, 200


class Unavailable(Exception):
    """A command or a library gave no answer; the message says why."""


class TimedOut(Unavailable):
    """What was asked had to be ended: it hangs, or the machine is slow."""


def run(args: Sequence[str], timeout: float) -> CompletedProcess[str]:
    """Run a program to its end, and collect its output on both streams; no shell is involved.

    After ``timeout`` seconds it and all that it started here are ended, which may take
    another ``TERM_GRACE_SECONDS``; then the return code is None. Raise OSError if it
    can't be started.
    """
    deadline = time.monotonic() + timeout
    timed_out = False
    output = BoundedOutput()

    def request() -> Request | None:
        nonlocal timed_out
        timed_out = time.monotonic() > deadline
        return "terminate" if timed_out else None

    returncode = supervise(
        args,
        env=os.environ,
        tag=(TAG_VARIABLE, secrets.token_hex(8)),
        on_output=lambda _, data: output.feed(data),
        request=request,
        merge_stderr=True,
    )
    status: Any = None if timed_out else returncode
    return CompletedProcess(args, status, output.text())


def check_output(args: Sequence[str], timeout: float) -> str:
    """Run a command to its end, and return what it printed on both streams.

    Raise TimedOut if it took more than ``timeout`` seconds, and was ended with all that
    it started, and Unavailable if it could not be started, failed or crashed.
    """
    name = os.path.basename(args[0])
    try:
        completed = run(args, timeout)
    except OSError as error:
        raise Unavailable(f"{args[0]} does not start: {error.strerror}") from None
    if completed.returncode is None:
        raise TimedOut(f"{name} did not end within {timeout:g} s")
    if code := completed.returncode:
        crash = SIGNAL_NAMES.get(-code, f"signal {-code}")
        how = f"ended with exit code {code}" if code > 0 else f"crashed ({crash})"
        raise Unavailable(f"{name} {how}{quote_output(completed.stdout)}")
    return completed.stdout


def quote_output(text: str) -> str:
    """Return some output on one line, shortened, after a colon; empty when there is none."""
    words = " ".join(word for word in text.split() if set(word) - set("-=*#"))
    if len(words) > QUOTED_FIRST + QUOTED_LAST:
        words = f"{words[:QUOTED_FIRST]} ... {words[-QUOTED_LAST:]}"
    return f": {words}" if words else ""
