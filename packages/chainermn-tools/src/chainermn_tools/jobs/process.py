"""Runs a program to its end or to a time limit, and leaves none of its processes here."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

# Whatever a program starts inherits this variable, and so it is found again: Open MPI's ranks
# have process groups of their own.
TAG_VARIABLE = "CHAINERMN_STARTED_BY"
# Seconds from SIGTERM to SIGKILL.
TERM_GRACE_SECONDS = 1.0
# While some are killed others may be born, so all processes are listed again, but not for ever.
MAX_KILL_ROUNDS = 5
# Characters of a failed command's output that are quoted: a launcher says what is wrong first,
# a Python traceback last.
QUOTED_FIRST, QUOTED_LAST = 200, 200

_running_tags: set[str] = set()
_closed = False


class Unavailable(Exception):
    """A command or a library gave no answer; the message says why."""


class TimedOut(Unavailable):
    """What was asked had to be ended: it hangs, or the machine is slow."""


@dataclass(frozen=True)
class CompletedProcess:
    """How a program ended.

    Attributes:
        returncode: its exit status, minus n after signal n; None when it had to be ended.
        stdout: its standard output, as far as it got.
        stderr: its standard error; empty where the two were merged.
    """

    returncode: int | None
    stdout: str
    stderr: str


def run(
    args: Sequence[str],
    timeout: float,
    *,
    env: Mapping[str, str] | None = None,
    merge_stderr: bool = False,
) -> CompletedProcess:
    """Run a program to its end; no shell is involved.

    Args:
        args: the program and its arguments.
        timeout: after so many seconds it and all that it started here are ended, which may take
            another ``TERM_GRACE_SECONDS``.
        env: all variables; those of this process when None.
        merge_stderr: whether ``stdout`` gets both streams, in the order of their writing.

    Raises:
        OSError: it could not be started.
    """
    tag = secrets.token_hex(8)
    variables = {**(os.environ if env is None else env), TAG_VARIABLE: tag}
    # Files, since a pipe would be held open by orphans that outlive the program.
    with contextlib.ExitStack() as files:
        out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        with register_tag(tag):
            process = subprocess.Popen(
                args,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT if merge_stderr else err,
                env=variables,
                # As from a shell: a rank finds its launcher through a file that it inherited.
                close_fds=False,
                start_new_session=True,
            )
            try:
                returncode: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                returncode = None
            finally:
                _end(process, tag)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return CompletedProcess(returncode, *texts)


def check_output(args: Sequence[str], timeout: float) -> str:
    """Run a command to its end, and return what it printed, both streams together.

    Args:
        args: the program and its arguments.
        timeout: after so many seconds the command and all that it started are ended.

    Raises:
        TimedOut: it took too long.
        Unavailable: it could not be started, failed or crashed.
    """
    name = os.path.basename(args[0])
    try:
        completed = run(args, timeout, merge_stderr=True)
    except OSError as error:
        raise Unavailable(f"{args[0]} does not start: {error.strerror}") from None
    if completed.returncode is None:
        raise TimedOut(f"{name} did not end within {timeout:g} s")
    if completed.returncode:
        how = _describe_returncode(completed.returncode)
        raise Unavailable(f"{name} {how}{quote_output(completed.stdout)}")
    return completed.stdout


def quote_output(text: str) -> str:
    """Return some output on one line, shortened, after a colon; empty when there is none."""
    words = " ".join(word for word in text.split() if set(word) - set("-=*#"))
    if not words:
        return ""
    if len(words) <= QUOTED_FIRST + QUOTED_LAST:
        return f": {words}"
    return f": {words[:QUOTED_FIRST]} ... {words[-QUOTED_LAST:]}"


@contextlib.contextmanager
def kill_children_on_exit() -> Iterator[None]:
    """Kill the programs that threads still run at the end of the block; no other can then start.

    Threads that were left behind may run some, and nobody waits for those.
    """
    global _closed
    _closed = False
    try:
        yield
    finally:
        _closed = True
        kill_by_env_tag(TAG_VARIABLE, tuple(_running_tags))


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise SystemExit, so that clean-up runs (main thread only)."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    # Those that are ignored stay so: nohup's, or a background job's.
    ours = [number for number in numbers if before[number] not in (signal.SIG_IGN, None)]
    for number in ours:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


def kill_by_env_tag(variable: str, values: Collection[str]) -> None:
    """Kill this user's processes on this machine that have one of the values in a variable.

    Args:
        variable: of their environment, as it was when they were started.
        values: each so random that no other process has it.
    """
    tags = {f"{variable}={value}".encode() for value in values}
    found = bool(tags)
    for _ in range(MAX_KILL_ROUNDS):
        if not found:
            return
        found = False
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if not tags.isdisjoint((folder / "environ").read_bytes().split(b"\0")):
                    os.kill(int(folder.name), signal.SIGKILL)
                    found = True


@contextlib.contextmanager
def register_tag(tag: str) -> Iterator[None]:
    """Register a tag while programs run that have it, for `kill_children_on_exit` to end them.

    Args:
        tag: in the programs' ``TAG_VARIABLE``.

    Raises:
        InterruptedError: programs are not started any more.
    """
    _running_tags.add(tag)  # before the question, or both could miss each other
    try:
        if _closed:
            raise InterruptedError(errno.EINTR, "no program is started any more")
        yield
    finally:
        _running_tags.discard(tag)


def _end(process: subprocess.Popen[bytes], tag: str) -> None:
    """End a program if it still runs, by SIGTERM so that launchers clean up, and its children."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERM_GRACE_SECONDS)
    kill_by_env_tag(TAG_VARIABLE, (tag,))
    process.wait()


def _describe_returncode(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"crashed ({signal.Signals(-code).name})"
    except ValueError:
        return f"crashed (signal {-code})"
