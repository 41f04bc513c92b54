"""A conversation with a program: orders, and answers that are waited for no longer than agreed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from chainermn_tools.doctor.hosts.remote import MARK

LONGEST_LINE = 1 << 20
KEPT_CHARACTERS = 20_000  # of what the program complains
PATIENCE_SECONDS = 1.0


class Conversation:
    """Starts a program that answers orders; a context manager that ends it.

    Raises:
        OSError: it can't be started.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._complaints = ""
        # Only ever waited for at most for a while: an orphan may hold their pipes for ever.
        self._readers = [
            threading.Thread(target=read, daemon=True)
            for read in (self._read_answers, self._read_complaints)
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        """End the program: politely, by the end of its input, then by force."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE_SECONDS)
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, how)
        self._process.wait()

    def tell(self, text: str) -> None:
        """Send orders; without effect if the program has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()

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
        if self._process.poll() is not None:
            self._readers[1].join(PATIENCE_SECONDS)
        return self._complaints

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(LONGEST_LINE):
            text = line.decode(errors="replace")
            if text.startswith(MARK):  # start-up files of shells print things, too
                with contextlib.suppress(ValueError):
                    self._answers.put(json.loads(text[len(MARK) :]))
        self._answers.put(None)

    def _read_complaints(self) -> None:
        assert self._process.stderr is not None
        while piece := os.read(self._process.stderr.fileno(), 1 << 16):
            text = self._complaints + piece.decode(errors="replace")
            self._complaints = text[-KEPT_CHARACTERS:]
