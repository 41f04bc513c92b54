"""This process's trace file, into which each call is written as it ends.

The file is an array of JSON in Chrome's trace event format, without the closing
bracket, so that a killed process leaves a file that can be read. No error reaches the
training: if the file can't be written, a warning says so, and the trace ends.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

TRACE_VARIABLE = "CHAINERMN_TRACE"
SCHEMA = 1  # raised when an event's argument changes its name or meaning
now = time.perf_counter  # CLOCK_MONOTONIC, which all processes of a machine share
to_json = json.JSONEncoder(separators=(",", ":")).encode

_file: TraceFile | None = None


def run_name() -> str:
    """Return the name of this run of the job, which is made at the first call and sorts by time."""
    if _file is not None:
        return _file.run
    return f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"


def begin(folder: str, run: str, rank: int, ranks: int) -> TraceFile:
    """Return this process's file; if it can't be made, an object that drops everything."""
    global _file
    if _file is None:
        _file = TraceFile(folder, run, rank, ranks)
    return _file


class TraceFile:
    """One rank's events, in ``folder/RUN.rankN.json``."""

    def __init__(self, folder: str, run: str, rank: int, ranks: int) -> None:
        self.run = run
        self.rank = rank
        self.zero = now()
        self._process = os.getpid()
        # The rows of threads in viewers.
        self._threads: dict[int, int] = {threading.main_thread().ident or 0: 0}
        self._descriptor: int | None = None  # None if nothing is written any more
        try:
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"{run}.rank{rank}.json")
            self._descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666
            )
        except OSError as problem:
            _warn(rank, f"no trace is written: {problem}")
        host = socket.gethostname()
        self._write("[\n")
        self.add_metadata(
            "chainermn",
            schema=SCHEMA,
            run=run,
            rank=rank,
            ranks=ranks,
            host=host,
            process=self._process,
            began=round(time.time(), 6),
            clock=_clock(),
            zero=micros(self.zero),
        )
        self.add_metadata("process_name", name=f"rank {rank} on {host}")
        self.add_metadata("thread_name", name="main thread")

    def add_call(
        self, operation: str, category: str, start: float, args: dict[str, Any]
    ) -> None:
        """Write a call of this thread's that began at ``start`` and ends now."""
        thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
        event = {
            "name": operation,
            "cat": category,
            "ph": "X",
            "pid": self.rank,
            "tid": thread,
            "ts": micros(start - self.zero),
            "dur": micros(now() - start),
            "args": args,
        }
        self._write(to_json(event) + ",\n")

    def add_metadata(self, name: str, /, **args: Any) -> None:
        """Write an event other than a call."""
        event = {"name": name, "ph": "M", "pid": self.rank, "tid": 0, "args": args}
        self._write(to_json(event) + ",\n")

    def _write(self, text: str) -> None:
        if self._descriptor is None or self._process != os.getpid():  # a forked child
            return
        try:
            # Written at once, so that a killed process loses nothing.
            os.write(self._descriptor, text.encode())
        except OSError as problem:  # a full disk
            self._descriptor = None
            _warn(self.rank, f"the trace ends here: {problem}")


def micros(seconds: float) -> float:
    """Return the time in microseconds, rounded to a nanosecond."""
    return round(seconds * 1e6, 3)


def _clock() -> str:
    """Return a text that is equal for processes that share a clock: it names the machine's boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/time').st_ino}"
    except OSError:
        return secrets.token_hex(8)


def _warn(rank: int, text: str) -> None:
    # An error would end the training, or leave the other ranks waiting.
    with suppress(RuntimeWarning):
        warnings.warn(
            f"rank {rank}: {text} ({TRACE_VARIABLE})", RuntimeWarning, stacklevel=4
        )
