"""Runs programs: the one engine that passes on their output and ends all that they started."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from chainermn_tools.jobs.tags import Tag, kill_by_env_tag, register_tag

# From SIGTERM to SIGKILL.
TERM_GRACE_SECONDS = 1.0
POLL_SECONDS = 0.1
READ_BYTES, TYPED_BYTES = 1 << 16, select.PIPE_BUF
# For output of processes that were killed.
SWEPT_SECONDS = 0.2
# For orphans that go on writing.
MAX_LINGER_SECONDS = 10.0
# Of the beginning of a program's output, and of its end, what is kept.
MAX_OUTPUT_BYTES = 8 << 20

# By SIGUSR1, once, which an mpiexec passes on to its ranks; by SIGTERM; or by SIGKILL.
Request = Literal["warn", "terminate", "kill"]

# Asks the kernel for a SIGTERM when the parent is killed, and then becomes the program.
# `preexec_fn` could do so too, but may deadlock where threads run.
DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(128 + signal.SIGTERM)
for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]} does not start: {error.strerror}")
"""


class BoundedOutput:
    """Output of a program: all of it, or its beginning and its end where it is long."""

    def __init__(self) -> None:
        self._first = bytearray()
        self._last = bytearray()

    def feed(self, data: bytes) -> None:
        room = MAX_OUTPUT_BYTES - len(self._first)
        self._first += data[:room]
        self._last += data[room:]
        if len(self._last) > 2 * MAX_OUTPUT_BYTES:
            del self._last[:-MAX_OUTPUT_BYTES]

    def text(self) -> str:
        """Return what was kept; bytes that are no text are replaced."""
        return (self._first + self._last[-MAX_OUTPUT_BYTES:]).decode(errors="replace")


def supervise(
    args: Sequence[str],
    *,
    env: Mapping[str, str],
    tag: Tag,  # added to ``env``: whatever inherits it is killed at the end
    # Called with 1 or 2, for standard output or error, and the next bytes; with none at
    # its end.
    on_output: Callable[[int, bytes], None],
    # Asked ten times a second, and after each output.
    request: Callable[[], Request | None],
    merge_stderr: bool = False,
    # Else there is no input; what is typed at a terminal is passed on.
    pass_stdin: bool = False,
    # Whether it gets SIGTERM when this process is killed.
    die_with_parent: bool = False,
    term_grace: float = TERM_GRACE_SECONDS,
    # Seconds that a process which outlives the program may be silent before it is
    # killed; its output is passed on meanwhile.
    linger: float = 0.0,
) -> int:
    """Run a program, pass on its output as it comes, and leave none of its processes here.

    It runs in a session of its own, so that Ctrl-C reaches only this process. Return
    the exit status, minus n after signal n. Raise OSError if the program can't be
    started, which is InterruptedError where no programs are started any more.
    """
    if die_with_parent:
        if shutil.which(args[0], path=env.get("PATH")) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), args[0])
        args = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            DIE_WITH_PARENT,
            str(os.getpid()),
            *args,
        ]
    # A terminal itself would stop a program that is no part of its foreground.
    is_typed = pass_stdin and sys.stdin.isatty()
    with register_tag(tag):
        process = subprocess.Popen(
            args,
            stdin=subprocess.PIPE
            if is_typed
            else None
            if pass_stdin
            else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merge_stderr else subprocess.PIPE,
            bufsize=0,
            env={**env, tag[0]: tag[1]},
            # As from a shell: a rank finds its launcher through a file that it
            # inherited.
            close_fds=False,
            start_new_session=True,
        )
        with process:  # closes its pipes
            try:
                _pump_output(process, on_output, request, tag, term_grace, linger)
            finally:
                _kill(process, tag)
    # What an mpiexec of Open MPI that was killed leaves.
    folder = os.path.join(env.get("TMPDIR", "/tmp"), f"ompi.{process.pid}")
    shutil.rmtree(folder, ignore_errors=True)
    return process.returncode


def _pump_output(
    process: subprocess.Popen[bytes],
    on_output: Callable[[int, bytes], None],
    request: Callable[[], Request | None],
    tag: Tag,
    term_grace: float,
    linger: float,
) -> None:
    """Pass output on until the program and its orphans have ended."""
    warned = False
    terminated_at: float | None = None
    exited_at: float | None = None
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
            _pass_typed(process)
            now = time.monotonic()
            if process.poll() is not None:
                exited_at = now if exited_at is None else exited_at
                if now - last_output > linger or now - exited_at > MAX_LINGER_SECONDS:
                    if swept:
                        break  # a process without the tag holds the pipe
                    _kill(process, tag)  # orphans; what they have written is still read
                    swept, last_output, exited_at, linger = (
                        True,
                        now,
                        now,
                        SWEPT_SECONDS,
                    )
                continue
            wanted = request()
            if wanted == "kill" or (
                terminated_at is not None and now - terminated_at > term_grace
            ):
                terminated_at = terminated_at or now
                _kill(process, tag)
            elif wanted == "warn" and not warned:
                process.send_signal(signal.SIGUSR1)
                warned = True
            elif wanted == "terminate" and terminated_at is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                terminated_at = now


def _pass_typed(process: subprocess.Popen[bytes]) -> None:
    """Pass on what was typed at the terminal, while this process is in its foreground."""
    if process.stdin is None or process.stdin.closed:
        return
    with contextlib.suppress(OSError):  # nobody reads it, or the terminal is gone
        readable, writable, _ = select.select([0], [process.stdin], [], 0)
        if not readable or not writable or os.tcgetpgrp(0) != os.getpgrp():
            return
        if typed := os.read(0, TYPED_BYTES):
            process.stdin.write(typed)
            return
    process.stdin.close()


def _kill(process: subprocess.Popen[bytes], tag: Tag) -> None:
    if process.poll() is None:
        process.kill()
    kill_by_env_tag(tag)
    process.wait()
