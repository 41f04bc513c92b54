"""This process's trace file: calls are put into a list, which a thread writes now and then.

The file is an array of JSON in Chrome's trace event format, whose closing bracket may
be missing. Nothing here raises into a training: where the file can't be written, or not
fast enough, a warning says so, and calls are dropped. A write to a hanging disk can't
be interrupted: hence the thread.
"""

from __future__ import annotations

import atexit
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

from ..observers import NOBODY

TRACE_VARIABLE = "CHAINERMN_TRACE"
# When the process is killed, it loses at most the calls of this time.
FLUSH_SECONDS = 0.25
# Calls that wait to be written, of some 250 bytes each: a hanging disk must not take
# all memory.
MOST_WAITING = 100_000
# For the thread to write its last, less than `faults.abort.LAST_RESORT_SECONDS`: a disk
# may hang.
END_SECONDS = 2.0
now = time.perf_counter  # CLOCK_MONOTONIC, which all processes of a machine share
to_json = json.JSONEncoder(separators=(",", ":")).encode

SCHEMA = 1  # raised when an event's argument changes its name or meaning

# Operation, name of the communicator, whether it is collective, bytes, root or peer,
# tag. A call is a tuple, which is cheap to make: its kind; number of the collective
# call; start, end, and when all had arrived (0: unknown), in seconds of this process's
# clock; thread; name of its exception.
Kind = tuple[str, str, bool, int, int, int]
Call = tuple[Kind, int, float, float, float, int, str | None]

_file: TraceFile | None = None


def run_name() -> str:
    """Return the name of this run of the job, which sorts by time; a new one at first."""
    return (
        _file.run
        if _file
        else f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"
    )


def begin(folder: str, run: str, rank: int, ranks: int) -> TraceFile:
    """Return this process's file; where it can't be made, one that drops everything."""
    global _file
    if _file is None:
        _file = TraceFile(folder, run, rank, ranks)
        atexit.register(end_trace)
    return _file


def end_trace() -> None:
    """Write what is known, and nothing more; for when the process is about to end."""
    if _file is not None:
        _file.end()


class TraceFile:
    """One rank's events, in ``folder/RUN.rankN.json``, which a thread alone writes."""

    def __init__(self, folder: str, run: str, rank: int, ranks: int) -> None:
        self.run, self.rank, self._process = run, rank, os.getpid()
        self.zero = now()
        self._waiting: list[Call | str] = ["[\n"]  # to be written
        self._room = MOST_WAITING  # 0 if nothing is written any more
        self._num_dropped = 0
        self._threads: dict[int, int] = {threading.main_thread().ident or 0: 0}
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._keep_writing, name="trace", daemon=True
        )
        host = socket.gethostname()
        about: dict[str, Any] = {
            "schema": SCHEMA,
            "run": run,
            "rank": rank,
            "ranks": ranks,
        }
        about |= {
            "host": host,
            "process": self._process,
            "began": round(time.time(), 6),
        }
        self.add_metadata(
            "chainermn", **about, clock=_clock(), zero=round(self.zero * 1e6, 3)
        )
        self.add_metadata("process_name", name=f"rank {rank} on {host}")
        self.add_metadata("thread_name", name="main thread")
        try:
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"{run}.rank{rank}.json")
            self._descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666
            )
        except OSError as problem:
            self._room = 0
            _warn(rank, f"no trace is written: {problem}")
        else:
            self._thread.start()

    def add_call(self, call: Call) -> None:
        if len(self._waiting) < self._room:
            self._waiting.append(call)
        else:
            self._num_dropped += 1

    def add_metadata(self, event: str, /, **args: Any) -> None:
        """Have an event written that is no call."""
        line = {"name": event, "ph": "M", "pid": self.rank, "tid": 0, "args": args}
        self._waiting.append(to_json(line) + ",\n")

    def end(self) -> None:
        """Have the thread write what is left, and wait for it, but not for ever."""
        if self._room and self._process == os.getpid():  # else a forked child
            self._ended.set()
            self._thread.join(END_SECONDS)
            if missing := self._num_dropped + len(self._waiting):
                _warn(self.rank, f"{missing} calls are missing: the disk is too slow")

    def _keep_writing(self) -> None:
        try:
            self._write_waiting()  # what the file begins with
            while not self._ended.wait(FLUSH_SECONDS):
                self._write_waiting()
            self._write_waiting()
        except OSError as problem:  # a full disk
            self._room = 0
            self._waiting.clear()
            _warn(self.rank, f"the trace ends here: {problem}")

    def _write_waiting(self) -> None:
        calls = self._waiting[:]  # others may add some meanwhile
        lines = [call if isinstance(call, str) else self._line(call) for call in calls]
        data = "".join(lines).encode()
        while data:
            data = data[os.write(self._descriptor, data) :]
        del self._waiting[: len(calls)]

    def _line(self, call: Call) -> str:
        kind, sequence, start, end, arrived, ident, error = call
        operation, communicator, is_collective, nbytes, peer, tag = kind
        args: dict[str, Any] = {"communicator": communicator, "bytes": nbytes}
        if is_collective:
            args |= {"root": peer} if peer != NOBODY else {}
            args |= {"sequence": sequence}
            args |= {"waited": round((arrived - start) * 1e6, 3)} if arrived else {}
        else:
            args |= {"peer": peer, "tag": tag}
        category = "collective" if is_collective else "message"
        event: dict[str, Any] = {"name": operation, "cat": category, "ph": "X"}
        event |= {
            "pid": self.rank,
            "tid": self._threads.setdefault(ident, len(self._threads)),
        }
        event |= {
            "ts": round((start - self.zero) * 1e6, 3),
            "dur": round((end - start) * 1e6, 3),
        }
        return (
            to_json({**event, "args": args | ({"error": error} if error else {})})
            + ",\n"
        )


def _clock() -> str:
    """Return a text that processes have in common which share a clock: the machine's boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/time').st_ino}"
    except OSError:
        return secrets.token_hex(8)


def _warn(rank: int, text: str) -> None:
    # As an error it would end the training, or leave the other ranks waiting.
    with suppress(RuntimeWarning):
        warnings.warn(
            f"rank {rank}: {text} ({TRACE_VARIABLE})", RuntimeWarning, stacklevel=4
        )
