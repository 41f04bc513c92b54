"""Runs a program to its end or to a time limit, and collects its output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from subprocess import CompletedProcess
from typing import Any

from chainermn_tools.jobs.children import running
from chainermn_tools.jobs.signals import SIGNAL_NAMES

# The time from SIGTERM to SIGKILL.
TERM_GRACE_SECONDS = 1.0
# The number of characters that are quoted of each end of a failed command's output: a
# launcher says first what is wrong, a Python traceback last.
QUOTED_CHARACTERS = 200


class Unavailable(Exception):
    """A command or a library gave no answer; the message says why."""


class TimedOut(Unavailable):
    """The command or library had to be ended: it hangs, or the machine is slow."""


def run(args: Sequence[str], timeout: float) -> CompletedProcess[str]:
    """Run a program to its end, and collect its output on both streams; no shell is involved.

    After ``timeout`` seconds the program and all that it started here are ended, which
    may take another ``TERM_GRACE_SECONDS``; then the return code is None. Raise OSError
    if the program can't be started.
    """
    with open(os.memfd_create("output"), "rb") as output:
        timed_out = False
        with running(
            args,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                timed_out = True
                os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(TERM_GRACE_SECONDS)
        status: Any = process.returncode
        if timed_out:
            status = None
        output.seek(0)
        return CompletedProcess(args, status, output.read().decode(errors="replace"))


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
    code = completed.returncode
    if code is None:
        raise TimedOut(f"{name} did not end within {timeout:g} s")
    if code == 0:
        return completed.stdout
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"crashed ({SIGNAL_NAMES.get(-code, f'signal {-code}')})"
    raise Unavailable(f"{name} {how}{quote_output(completed.stdout)}")


def quote_output(text: str) -> str:
    """Return some output on one line, shortened, after a colon; an empty text without output."""
    words = " ".join(word for word in text.split() if set(word) - set("-=*#"))
    if not words:
        return ""
    if len(words) > 2 * QUOTED_CHARACTERS:
        words = f"{words[:QUOTED_CHARACTERS]} ... {words[-QUOTED_CHARACTERS:]}"
    return f": {words}"
