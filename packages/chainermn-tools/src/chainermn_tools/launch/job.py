"""Runs mpiexec to its end, passing its output on, and leaves none of its processes behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, BinaryIO

from chainermn_tools import jobs
from chainermn_tools.jobs import JOB_VARIABLE
from chainermn_tools.launch.records import Reader

# How long a job may go on once a rank said that it failed, or others that one was lost: the abort
# hook ends it in about one second, but a rank that fails before MPI is initialized leaves the
# others waiting, and mpiexec itself waits for ever for a host whose link is cut.
FAILED_SECONDS = 4.0
# What was told to end has this long before it is killed.
PATIENCE_SECONDS = 5.0
# After mpiexec has ended, output may still be on its way, or the pipe be held by an orphan.
SILENCE_SECONDS = 1.0
POLL_SECONDS = 0.1
# The end of the output, where mpiexec says what it thinks of the ranks.
TAIL_BYTES = 1 << 16
# What mpiexec says of a rank that ended badly: MPICH, and Open MPI.
LOST = re.compile(rb"\bPID (\d+) (?:RUNNING AT|on node) ")
# What the watchdog of chainermn-comm says when it ends a machine's ranks. Open MPI's mpiexec says
# nothing of them while it waits for the other machine.
WATCHDOG_ENDS = re.compile(
    rb"CHAINERMN_TIMEOUT is set: ending the job|ChainerMN: (\S+ has not answered for [^:]+)"
)
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # of sys/prctl.h
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Outcome:
    """How a job ended.

    Attributes:
        status: of mpiexec, as a shell would say it; 128 + n for signal n.
        interrupted: the first signal that this process got meanwhile; None for none.
        records: what the ranks said: (rank, record), as it came in.
        tail: the end of the output.
    """

    status: int = 1
    interrupted: int | None = None
    records: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    tail: bytes = b""

    def of_kind(self, kind: str) -> dict[int, dict[str, Any]]:
        """Each rank's first record of a kind, as they came in."""
        found: dict[int, dict[str, Any]] = {}
        for rank, record in self.records:
            if record["kind"] == kind:
                found.setdefault(rank, record)
        return found

    def has_failed(self) -> bool:
        """Whether a rank said that it failed, or mpiexec that it lost one, or the watchdog."""
        if self.of_kind("failed") or WATCHDOG_ENDS.search(self.tail):
            return True
        # Ranks may print the words too, of jobs that they start.
        lost = {int(pid) for pid in LOST.findall(self.tail)}
        return bool(lost) and any(said["pid"] in lost for said in self.of_kind("hello").values())


@contextlib.contextmanager
def noting_signals() -> Iterator[list[int]]:
    """Meanwhile signals that would end this process only go into the list that is given."""
    noted: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    # Those that are ignored stay so: nohup's, or a background job's.
    ours = [number for number in SIGNALS if before[number] not in (signal.SIG_IGN, None)]
    for number in ours:
        signal.signal(number, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        for number in ours:
            signal.signal(number, before[number])


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    signals: list[int],
    change: Callable[[bytes], bytes],
) -> Outcome:
    """Run a job, and pass on what it prints.

    Args:
        command: mpiexec and its arguments.
        environment: all variables, JOB_VARIABLE among them.
        signals: grows while the job runs: one signal ends the job, another kills it.
        change: is given pieces of output, and returns what is shown of them.

    Returns:
        How it ended. Then none of its processes on this host is left.

    Raises:
        OSError: mpiexec can't be started, or the output can't be written.
    """
    process = subprocess.Popen(
        command,
        # Not a terminal: mpiexec is no part of its foreground, and would be stopped.
        stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        start_new_session=True,  # so that Ctrl-C reaches us alone
        preexec_fn=_end_with_parent,
    )
    outcome = Outcome()
    try:
        _pass_on(process, environment[JOB_VARIABLE], signals, change, outcome)
        code = process.wait()
        outcome.status = code if code >= 0 else 128 - code
    finally:
        _kill_all(process, environment[JOB_VARIABLE])
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    outcome.interrupted = signals[0] if signals else None
    return outcome


def _end_with_parent() -> None:
    """Let the kernel tell this process, a child of ours, to end when we are killed."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _pass_on(
    process: subprocess.Popen[bytes],
    launch: str,
    signals: list[int],
    change: Callable[[bytes], bytes],
    outcome: Outcome,
) -> None:
    """Pass output on until mpiexec has ended; end it when a rank failed or a signal came."""
    assert process.stdout is not None
    assert process.stderr is not None
    streams = {process.stdout: sys.stdout.buffer, process.stderr: sys.stderr.buffer}
    readers = {stream: Reader(launch) for stream in streams}
    heard = time.monotonic()
    failed = told = None  # since when
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() or process.poll() is None:
            ready = selector.select(POLL_SECONDS)
            now = time.monotonic()
            for key, _ in ready:
                heard = now
                source: Any = key.fileobj
                if not _forward(source, readers[source], streams[source], change, outcome):
                    selector.unregister(source)
            if failed is None and ready and outcome.has_failed():
                failed = now
            if process.poll() is not None:
                if now - heard > SILENCE_SECONDS:
                    break
            elif told is None:
                if signals or (failed is not None and now - failed > FAILED_SECONDS):
                    process.terminate()
                    told = now
            elif len(signals) > 1 or now - told > PATIENCE_SECONDS:
                _kill_all(process, launch)


def _forward(
    source: IO[bytes],
    reader: Reader,
    sink: BinaryIO,
    change: Callable[[bytes], bytes],
    outcome: Outcome,
) -> bool:
    """Read once and pass on what is no record; False at the stream's end."""
    data = os.read(source.fileno(), 1 << 16)
    shown = change(reader.feed(data) if data else reader.close())
    outcome.records += reader.records
    reader.records.clear()
    outcome.tail = (outcome.tail + shown)[-TAIL_BYTES:]
    if shown:
        sink.write(shown)
        sink.flush()
    return bool(data)


def _kill_all(process: subprocess.Popen[bytes], launch: str) -> None:
    """Kill what is left of a job on this host: mpiexec, its helpers, the ranks, their children."""
    if process.poll() is None:
        process.kill()
    jobs.kill_by_env_tag(JOB_VARIABLE, (launch,))
    process.wait()
