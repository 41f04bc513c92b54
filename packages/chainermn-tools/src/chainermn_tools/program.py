"""Runs a program to its end or to a limit, and leaves none of its processes on this machine."""

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
MARK_VARIABLE = "CHAINERMN_STARTED_BY"
# A program that was told to end has this long to do so before it is killed.
PATIENCE_SECONDS = 1.0
# While some are killed others may be born, so we look again, but not for ever.
ROUNDS = 5

_running: set[str] = set()  # marks of the programs that run now
_closed = False


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        status: its exit status, minus n after signal n; None when it had to be ended.
        out: its standard output, as far as it got.
        err: its standard error; empty where the two were merged.
    """

    status: int | None
    out: str
    err: str


def run(
    words: Sequence[str],
    seconds: float,
    *,
    environment: Mapping[str, str] | None = None,
    merged: bool = False,
) -> Ended:
    """Run a program; no shell is involved.

    Args:
        words: the program and its arguments.
        seconds: after this long it and all that it started here are ended, which may take
            another ``PATIENCE_SECONDS``.
        environment: all variables; this process's when None.
        merged: whether ``out`` gets both streams, as they came.

    Raises:
        OSError: it could not be started.
    """
    mark = secrets.token_hex(8)
    variables = {**(os.environ if environment is None else environment), MARK_VARIABLE: mark}
    # Files, since a pipe would be held open by orphans that outlive the program.
    with contextlib.ExitStack() as files:
        out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        with noted(mark):
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT if merged else err,
                env=variables,
                # As from a shell: a rank finds its launcher through a file that it inherited.
                close_fds=False,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process, mark)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Ended(status, *texts)


@contextlib.contextmanager
def leaving_none() -> Iterator[None]:
    """At the end of the block all programs are ended that threads still run, and none is started.

    Threads that were left behind may run some, and nobody waits for those.
    """
    global _closed
    _closed = False
    try:
        yield
    finally:
        _closed = True
        kill_marked(MARK_VARIABLE, tuple(_running))


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Meanwhile a signal ends this program in order: what it started is ended first."""

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


def kill_marked(variable: str, values: Collection[str]) -> None:
    """Kill this user's processes on this machine that have one of the values in a variable.

    Args:
        variable: of their environment, as it was when they were started.
        values: each so random that no other process has it.
    """
    marks = {f"{variable}={value}".encode() for value in values}
    found = bool(marks)
    for _ in range(ROUNDS):
        if not found:
            return
        found = False
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if not marks.isdisjoint((folder / "environ").read_bytes().split(b"\0")):
                    os.kill(int(folder.name), signal.SIGKILL)
                    found = True


@contextlib.contextmanager
def noted(mark: str) -> Iterator[None]:
    """In the block programs run that have a mark; `leaving_none` ends them if it must.

    Args:
        mark: in the programs' ``MARK_VARIABLE``.

    Raises:
        InterruptedError: programs are not started any more.
    """
    _running.add(mark)  # before the question, or both could miss each other
    try:
        if _closed:
            raise InterruptedError(errno.EINTR, "no program is started any more")
        yield
    finally:
        _running.discard(mark)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a program if it still runs, politely, so that launchers clean up; then what it left."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_SECONDS)
    kill_marked(MARK_VARIABLE, (mark,))
    process.wait()
