"""This process's trace file: calls are put into a queue, which a thread writes now and then.

The file is an array of JSON in Chrome's trace event format, whose closing bracket may be missing;
each line is an event and a comma. Nothing here raises into a training: where the file can't be
written, or not fast enough, a warning says so, and calls are dropped.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import secrets
import socket
import threading
import time
import warnings
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..observers import NOBODY

TRACE_VARIABLE = "CHAINERMN_TRACE"
# When the process is killed, it loses at most the calls of this time.
FLUSH_SECONDS = 0.25
# Calls that wait to be written, of some 250 bytes each (a hanging network disk must not take all
# memory), and that are written at a time.
MOST_QUEUED, BATCH = 100_000, 10_000
# For the thread to write its last at the end: a hanging network disk must not keep the job.
END_SECONDS = 5.0
# CLOCK_MONOTONIC, which all processes of a machine share.
now = time.perf_counter

# Raised when an event's argument changes its name or meaning.
SCHEMA = 1
OPENING = "[\n"
# Names of the metadata events that are ours; viewers leave them alone.
FILE, COMMUNICATOR, CLOCK = "chainermn", "chainermn communicator", "chainermn clock"


# Operation, name of the communicator, whether it is collective, bytes, root or peer, tag: there are
# few kinds of calls. A call is a tuple, which is cheap to make: its kind; number of the collective
# call; start, end, and when all ranks had arrived (0: unknown), in seconds of this process's clock;
# the thread; name of the exception that ended it.
Kind = tuple[str, str, bool, int, int, int]
Call = tuple[Kind, int, float, float, float, int, str | None]

_file: TraceFile | None = None


def trace_folder() -> str | None:
    """Return the folder for traces that the environment names; None where it names none."""
    return os.environ.get(TRACE_VARIABLE) or None


def run_name() -> str:
    """Return the name of this run of the job, which sorts by time; a new one at first."""
    return _file.run if _file else f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"


def begin(folder: str, run: str, rank: int, ranks: int) -> TraceFile:
    """Make this process's file; where that fails, one that drops everything."""
    global _file
    if _file is None:
        _file = TraceFile(folder, run, rank, ranks)
        os.register_at_fork(after_in_child=_reset_in_child)
        atexit.register(_file.end)
    return _file


def flush_trace() -> None:
    """Write what is known now; for when the process is about to end otherwise than by itself."""
    if _file is not None:
        _file.flush()


class TraceFile:
    """One rank's events, in ``folder/RUN.rankN.json``."""

    def __init__(self, folder: str, run: str, rank: int, ranks: int) -> None:
        self.run, self.rank = run, rank
        self.zero = now()
        self._queue: deque[Call | str] = deque()
        self._num_dropped = 0
        self._threads: dict[int, int] = {threading.main_thread().ident or 0: 0}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._descriptor: int | None = None
        host = socket.gethostname()
        about: dict[str, Any] = {"schema": SCHEMA, "run": run, "rank": rank, "ranks": ranks}
        about |= {"host": host, "process": os.getpid(), "began": round(time.time(), 6)}
        header = metadata(FILE, rank, **about, clock=_clock(), zero=microseconds(self.zero))
        header += metadata("process_name", rank, name=f"rank {rank} on {host}")
        header += metadata("process_sort_index", rank, sort_index=rank)
        header += metadata("thread_name", rank, name="main thread")
        try:
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"{run}.rank{rank}.json")
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as problem:
            _warn(rank, f"no trace is written: {problem}")
        else:
            self._write(OPENING + header)
        self._thread = threading.Thread(target=self._keep_writing, name="trace", daemon=True)
        self._thread.start()

    def add_call(self, call: Call) -> None:
        """Have a call written."""
        if len(self._queue) < MOST_QUEUED:
            self._queue.append(call)
        else:
            self._num_dropped += 1

    def add_metadata(self, event: str, /, **args: Any) -> None:
        """Have an event written that is no call."""
        self._queue.append(metadata(event, self.rank, **args))

    def flush(self) -> None:
        """Write all calls that ended."""
        with self._lock:
            for _ in range(0, len(self._queue), BATCH):
                lines = []
                with suppress(IndexError):
                    for _ in range(BATCH):
                        item = self._queue.popleft()
                        lines.append(item if isinstance(item, str) else self._line(item))
                self._write("".join(lines))

    def end(self) -> None:
        """Write what is left, and wait for it, but not for ever."""
        self._ended.set()
        self._thread.join(END_SECONDS)
        if self._num_dropped:
            _warn(self.rank, f"{self._num_dropped} calls are missing: the disk is too slow")

    def _keep_writing(self) -> None:
        while not self._ended.wait(FLUSH_SECONDS):
            self.flush()
        self.flush()

    def _line(self, call: Call) -> str:
        kind, sequence, start, end, arrived, ident, error = call
        line = ""
        thread = self._threads.get(ident)
        if thread is None:
            thread = self._threads[ident] = len(self._threads)
            line = metadata("thread_name", self.rank, thread, name=f"thread {thread}")
        head, tail = _parts(kind, self.rank, thread)
        line += f'{head}{(start - self.zero) * 1e6:.3f},"dur":{(end - start) * 1e6:.3f}{tail}'
        if kind[2]:
            line += f',"sequence":{sequence}'
            if arrived:
                line += f',"waited":{(arrived - start) * 1e6:.3f}'
        if error is not None:
            line += f',"error":{json.dumps(error)}'
        return line + "}},\n"

    def _write(self, text: str) -> None:
        data = text.encode()
        try:
            while data and self._descriptor is not None:
                data = data[os.write(self._descriptor, data) :]
        except OSError as problem:  # a full disk
            with suppress(OSError):
                os.close(self._descriptor)  # type: ignore[arg-type]
            self._descriptor = None
            _warn(self.rank, f"the trace ends here: {problem}")


def microseconds(seconds: float) -> float:
    """Return a time as the file gives it."""
    return round(seconds * 1e6, 3)


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
        warnings.warn(f"rank {rank}: {text} ({TRACE_VARIABLE})", RuntimeWarning, stacklevel=4)


def _reset_in_child() -> None:
    """Leave the file to the parent, in a forked child."""
    global _file
    if _file is not None:
        atexit.unregister(_file.end)
        _file._descriptor = None
        _file._queue.clear()
        _file = None


@functools.lru_cache(maxsize=256)
def _parts(kind: Kind, rank: int, thread: int) -> tuple[str, str]:
    """Return what lines have around their times, made once: formatting is most of the cost."""
    operation, communicator, collective, nbytes, peer, tag = kind
    head = (
        f'{{"name":{json.dumps(operation)},"cat":"{"collective" if collective else "message"}",'
        f'"ph":"X","pid":{rank},"tid":{thread},"ts":'
    )
    tail = f',"args":{{"communicator":{json.dumps(communicator)},"bytes":{nbytes}'
    if not collective:
        tail += f',"peer":{peer},"tag":{tag}'
    elif peer != NOBODY:
        tail += f',"root":{peer}'
    return head, tail


def metadata(event: str, rank: int, thread: int = 0, /, **args: Any) -> str:
    """Return the line of an event that has no time of its own."""
    line = {"name": event, "ph": "M", "pid": rank, "tid": thread, "args": args}
    return json.dumps(line, separators=(",", ":")) + ",\n"
