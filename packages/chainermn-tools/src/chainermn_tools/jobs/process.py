"""Runs a program to its end or to a time limit, and leaves none of its processes here."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

# Whatever a program starts inherits this variable, and so it is found again: Open MPI's ranks
# have process groups of their own.
TAG_VARIABLE = "CHAINERMN_STARTED_BY"
# Seconds from SIGTERM to SIGKILL.
TERM_GRACE_SECONDS = 1.0
# While some are killed others may be born, so all processes are listed again, but not for ever.
MAX_KILL_ROUNDS = 5
POLL_SECONDS = 0.1
READ_BYTES = 1 << 16
# For output of processes that were killed.
SWEPT_SECONDS = 0.2
# Of the beginning of a program's output, and of its end, what is kept.
MAX_OUTPUT_BYTES = 8 << 20
# Characters of a failed command's output that are quoted: a launcher says what is wrong first,
# a Python traceback last.
QUOTED_FIRST, QUOTED_LAST = 200, 200

Request = Literal["terminate", "kill"]

# A program that is run in place of itself by this one is told by the kernel when we are killed;
# `preexec_fn` could do so too, but may deadlock where threads run.
DIE_WITH_PARENT = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGTERM = 1, 15
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(128 + SIGTERM)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]} does not start: {error.strerror}")
"""

_running_tags: set[tuple[str, str]] = set()
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


class BoundedOutput:
    """Output of a program: all of it, or its beginning and its end where it is long."""

    def __init__(self) -> None:
        self._first = bytearray()
        self._last = bytearray()

    def feed(self, data: bytes) -> None:
        """Add the next bytes."""
        room = MAX_OUTPUT_BYTES - len(self._first)
        self._first += data[:room]
        self._last += data[room:]
        if len(self._last) > 2 * MAX_OUTPUT_BYTES:
            del self._last[:-MAX_OUTPUT_BYTES]

    def text(self) -> str:
        """Return what was kept; bytes that are no text are replaced."""
        return (self._first + self._last[-MAX_OUTPUT_BYTES:]).decode(errors="replace")


def run(
    args: Sequence[str],
    timeout: float,
    *,
    env: Mapping[str, str] | None = None,
    merge_stderr: bool = False,
) -> CompletedProcess:
    """Run a program to its end, and collect its output; no shell is involved.

    Args:
        args: the program and its arguments.
        timeout: after so many seconds it and all that it started here are ended, which may take
            another ``TERM_GRACE_SECONDS``.
        env: all variables; those of this process when None.
        merge_stderr: whether ``stdout`` gets both streams, in the order of their writing.

    Raises:
        OSError: it could not be started.
    """
    deadline = time.monotonic() + timeout
    timed_out = False
    output = {1: BoundedOutput(), 2: BoundedOutput()}

    def request() -> Request | None:
        nonlocal timed_out
        timed_out = time.monotonic() > deadline
        return "terminate" if timed_out else None

    returncode = supervise(
        args,
        env=os.environ if env is None else env,
        tag=(TAG_VARIABLE, secrets.token_hex(8)),
        on_output=lambda stream, data: output[stream].feed(data),
        request=request,
        merge_stderr=merge_stderr,
    )
    return CompletedProcess(None if timed_out else returncode, output[1].text(), output[2].text())


def supervise(
    args: Sequence[str],
    *,
    env: Mapping[str, str],
    tag: tuple[str, str],
    on_output: Callable[[int, bytes], None],
    request: Callable[[], Request | None],
    merge_stderr: bool = False,
    pass_stdin: bool = False,
    die_with_parent: bool = False,
    term_grace: float = TERM_GRACE_SECONDS,
    linger: float = 0.0,
) -> int:
    """Run a program, pass on its output as it comes, and leave none of its processes here.

    It runs in a session of its own, so that Ctrl-C reaches only this process.

    Args:
        args: the program and its arguments.
        env: all variables.
        tag: a variable and a random value, added to ``env``: whatever inherits it is killed at
            the end.
        on_output: called with 1 or 2, for standard output or error, and the next bytes; with no
            bytes at the end of a stream.
        request: asked ten times a second, and after each output, whether to terminate the
            program (by SIGTERM) or to kill it.
        merge_stderr: whether standard error goes to standard output.
        pass_stdin: whether the program gets this process's standard input; else it gets none.
        die_with_parent: whether the program gets SIGTERM when this process is killed.
        term_grace: seconds from SIGTERM to SIGKILL.
        linger: for how long a process that outlives the program may be silent before it is
            killed; its output is passed on meanwhile.

    Returns:
        The exit status, minus n after signal n.

    Raises:
        OSError: the program can't be started.
        InterruptedError: programs are not started any more.
    """
    if die_with_parent:
        found = shutil.which(args[0], path=env.get("PATH"))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), args[0])
        args = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), *args]
    with register_tag(tag[1], tag[0]):
        process = subprocess.Popen(
            args,
            stdin=None if pass_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merge_stderr else subprocess.PIPE,
            env={**env, tag[0]: tag[1]},
            # As from a shell: a rank finds its launcher through a file that it inherited.
            close_fds=False,
            start_new_session=True,
        )
        try:
            _pump_output(process, on_output, request, tag, term_grace, linger)
        finally:
            _kill(process, tag)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
    return process.returncode


def _pump_output(
    process: subprocess.Popen[bytes],
    on_output: Callable[[int, bytes], None],
    request: Callable[[], Request | None],
    tag: tuple[str, str],
    term_grace: float,
    linger: float,
) -> None:
    """Pass output on until the program and its orphans have ended."""
    terminated_at: float | None = None
    swept = False
    last_output = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for number, stream in ((1, process.stdout), (2, process.stderr)):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ, number)
        while selector.get_map() or process.poll() is None:
            if not selector.get_map():  # it has closed its output
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
            for key, _ in selector.select(POLL_SECONDS) if selector.get_map() else ():
                last_output = time.monotonic()
                data = os.read(key.fd, READ_BYTES)
                on_output(key.data, data)
                if not data:
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            if process.poll() is not None:
                if now - last_output > (SWEPT_SECONDS if swept else linger):
                    if swept:
                        break  # a process that hides from us holds the pipe
                    _kill(process, tag)  # orphans; what they have written is still read
                    swept, last_output = True, now
                continue
            wanted = request()
            if wanted == "kill" or (terminated_at is not None and now - terminated_at > term_grace):
                terminated_at = terminated_at or now
                _kill(process, tag)
            elif wanted == "terminate" and terminated_at is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                terminated_at = now


def _kill(process: subprocess.Popen[bytes], tag: tuple[str, str]) -> None:
    """Kill the program, and whatever has its tag."""
    if process.poll() is None:
        process.kill()
    kill_by_env_tag(tag[0], (tag[1],))
    process.wait()


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
        for variable, value in tuple(_running_tags):
            kill_by_env_tag(variable, (value,))


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
def register_tag(tag: str, variable: str = TAG_VARIABLE) -> Iterator[None]:
    """Register a tag while programs run that have it, for `kill_children_on_exit` to end them.

    Args:
        tag: a value in the programs' environment.
        variable: which has it.

    Raises:
        InterruptedError: programs are not started any more.
    """
    _running_tags.add((variable, tag))  # before the question, or both could miss each other
    try:
        if _closed:
            raise InterruptedError(errno.EINTR, "no program is started any more")
        yield
    finally:
        _running_tags.discard((variable, tag))


def _describe_returncode(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"crashed ({signal.Signals(-code).name})"
    except ValueError:
        return f"crashed (signal {-code})"
