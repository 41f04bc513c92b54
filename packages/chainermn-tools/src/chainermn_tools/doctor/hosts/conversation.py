"""A conversation with a program: orders, and answers that are waited for no longer than agreed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from chainermn_tools import jobs
from chainermn_tools.doctor.hosts.remote import MARK

LONGEST_LINE = 1 << 20
KEPT_CHARACTERS = 20_000  # of what the program complains
PATIENCE_SECONDS = 1.0


@contextlib.contextmanager
def conversations() -> Iterator[Callable[[Sequence[str]], Conversation]]:
    """Gives a function that starts a program; at the end of the block all are ended, together."""
    mark = secrets.token_hex(8)
    started: list[Conversation] = []

    def start(command: Sequence[str]) -> Conversation:
        started.append(Conversation(command, mark))
        return started[-1]

    with jobs.register_tag(mark):
        try:
            yield start
        finally:
            _end([one.process for one in started], mark)


def _end(processes: Sequence[subprocess.Popen[bytes]], mark: str) -> None:
    """End programs: by the end of their input, then by a signal, and then by force."""
    for process in processes:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
    _wait(processes)
    for process in processes:
        process.terminate()
    _wait(processes)
    jobs.kill_by_env_tag(jobs.TAG_VARIABLE, (mark,))
    for process in processes:
        process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for all, but not longer than agreed."""
    until = time.monotonic() + PATIENCE_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))


class Conversation:
    """A program that answers orders; made by what :func:`conversations` gives.

    Attributes:
        process: of the program.
        began: when it was started, on ``time.monotonic()``'s clock.
    """

    def __init__(self, command: Sequence[str], mark: str) -> None:
        """Start it.

        Args:
            command: the words of the program.
            mark: by which it is found again.

        Raises:
            OSError: it can't be started.
        """
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, jobs.TAG_VARIABLE: mark},
            start_new_session=True,
        )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._complaints = ""
        # Nobody waits for them to end: an orphan may hold their pipes for ever.
        self._readers = [
            threading.Thread(target=read, daemon=True)
            for read in (self._read_answers, self._read_complaints)
        ]
        for reader in self._readers:
            reader.start()

    def tell(self, text: str) -> None:
        """Send orders; without effect if the program has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(text.encode())
            self.process.stdin.flush()

    def hear(self, until: float) -> dict[str, Any] | None:
        """The next answer; None if there is none by then, or the program has said its last.

        Args:
            until: on ``time.monotonic()``'s clock.
        """
        try:
            return self._answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return None

    def complaints(self) -> str:
        """What came over standard error."""
        if self.process.poll() is not None:
            self._readers[1].join(PATIENCE_SECONDS)
        return self._complaints

    def _read_answers(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            while line := lines.readline(LONGEST_LINE):
                text = line.decode(errors="replace")
                if text.startswith(MARK):  # start-up files of shells print things, too
                    with contextlib.suppress(ValueError):
                        self._answers.put(json.loads(text[len(MARK) :]))
        self._answers.put(None)

    def _read_complaints(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as pipe:
            while piece := os.read(pipe.fileno(), 1 << 16):
                text = self._complaints + piece.decode(errors="replace")
                self._complaints = text[-KEPT_CHARACTERS:]
