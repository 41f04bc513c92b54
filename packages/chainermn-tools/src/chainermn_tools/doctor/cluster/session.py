"""Sessions with the agent on each host, over ssh or on this machine.

The command that ssh passes to a host's login shell, of whatever kind, is always the
same: a POSIX shell reads its code from its input, and paths as data, which can't be
taken for anything else.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

from chainermn_tools import jobs
from chainermn_tools.doctor.cluster import agent

# For a login shell, which may be csh or fish: nothing in it is special to these.
COMMAND = "exec sh -c 'IFS= read -r code && eval \"$code\"'"
# The next line of the input is the program; it reads what follows.
LOADER = 'import json, sys; exec(compile(json.loads(sys.stdin.readline()), "doctor", "exec"))'
# Python's path is a line of the input, too; where it doesn't run, the shell answers
# why.
CODE = (
    f"IFS= read -r python; \"$python\" -c '{LOADER}'; status=$?; "
    f"[ $status = 0 ] || printf '\\n%s{{\"status\": %d}}\\n' {agent.MARK} $status"
)
MAX_LINE_BYTES = 1 << 20
MAX_STDERR_CHARACTERS = 20_000
GRACE_SECONDS = 1.0


def first_input(python: str, order: dict[str, Any]) -> bytes:
    """Return what a host's shell reads: its code, Python's path, the agent, and a first order."""
    program = json.dumps(Path(agent.__file__).read_text())
    return os.fsencode(
        "".join(f"{one}\n" for one in (CODE, python, program, json.dumps(order)))
    )


@contextlib.contextmanager
def open_sessions() -> Iterator[Callable[[Sequence[str]], Session]]:
    """Yield a function that starts a session; at the end of the block all are ended, together."""
    tag = jobs.TAG_VARIABLE, secrets.token_hex(8)
    sessions: list[Session] = []

    def start(args: Sequence[str]) -> Session:
        sessions.append(Session(args, tag))
        return sessions[-1]

    with jobs.register_tag(tag):
        try:
            yield start
        finally:
            _end([one.process for one in sessions], tag)


def _end(processes: Sequence[Popen[bytes]], tag: tuple[str, str]) -> None:
    """End programs: by the end of their input, then by SIGTERM, and then by SIGKILL."""
    for stop in (_close_input, Popen.terminate):
        for process in processes:
            stop(process)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in processes:
            with contextlib.suppress(TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    jobs.kill_by_env_tag(tag)
    for process in processes:
        process.wait()


def _close_input(process: Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()


class Session:
    """A program that answers orders; made by what :func:`open_sessions` yields."""

    def __init__(self, args: Sequence[str], tag: tuple[str, str]) -> None:
        """Start the program, which is found again by the tag; raise OSError if it can't be."""
        self.started = time.monotonic()
        # The first answer has come, or the program has ended.
        self.answered = threading.Event()
        # What came over standard error so far, the end of it if it is long.
        self.stderr = ""
        env = {**os.environ, tag[0]: tag[1]}
        self.process = Popen(
            args, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env, start_new_session=True
        )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        # Nobody waits for them to end: an orphan may hold their pipes for ever.
        self._stderr_reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr_reader.start()
        threading.Thread(target=self._read_answers, daemon=True).start()

    def send(self, lines: bytes) -> None:
        """Send lines; without effect if the program has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(lines)
            self.process.stdin.flush()

    def receive(self, deadline: float) -> dict[str, Any] | None:
        """Return the next answer; None if there is none in time, or the program has ended."""
        try:
            return self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def _read_answers(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            while line := lines.readline(MAX_LINE_BYTES):
                text = line.decode(errors="replace")
                # Start-up files of shells print things, too.
                if text.startswith(agent.MARK):
                    with contextlib.suppress(ValueError):
                        self._answers.put(json.loads(text[len(agent.MARK) :]))
                        self.answered.set()
        # A caller that learns that the program has ended asks why.
        self._stderr_reader.join(GRACE_SECONDS)
        self._answers.put(None)
        self.answered.set()

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as pipe:
            while piece := os.read(pipe.fileno(), 1 << 16):
                text = self.stderr + piece.decode(errors="replace")
                self.stderr = text[-MAX_STDERR_CHARACTERS:]
