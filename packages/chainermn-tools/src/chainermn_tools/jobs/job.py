"""Runs an mpiexec job to its end, and collects what its ranks and mpiexec report."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from _chainermn_events import GRACE_SECONDS, JOB_VARIABLE, SIGNAL_STATUS
from chainermn_tools.jobs.children import running
from chainermn_tools.jobs.events import Decoder, Event, LostProcess, find_lost
from chainermn_tools.jobs.signals import WARNINGS

# How long a job may go on after a rank has reported its failure, or the loss of a rank
# was reported: the abort hook ends it in about one second, but a rank that fails before
# MPI is initialized leaves the others waiting, and mpiexec itself waits for ever for a
# host whose link is cut.
FAILED_SECONDS = 4.0
# How long a job may go on after all ranks have reported that they finished: mpiexec
# waits for a process that a rank has left and that holds the rank's output.
FINISHED_SECONDS = 10.0
# The time from SIGTERM to SIGKILL.
TERM_GRACE_SECONDS = 5.0
POLL_SECONDS = 0.1
# The output of processes that outlive mpiexec is passed on for this time, since a
# helper may just be about to write.
LINGER_SECONDS = 1.0
READ_BYTES = 1 << 16
# The size of the end of the output, which is searched for mpiexec's reports, and for
# known errors if no rank has started.
TAIL_BYTES = 1 << 20
# Events after which a job can't succeed; docs/decisions/tools.md lists all events.
FAILURES = ("failed", "exited", "aborted", "rank_lost", "watchdog_abort")
# Asks the kernel for a SIGTERM when the parent, whose number follows, is killed, and
# then becomes a program. `preexec_fn` could do so, too, but may deadlock if threads
# run.
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
DYING_WITH_PARENT = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT]


@dataclass
class JobOutput:
    """How a job ended, and the reports about it."""

    status: int = 1  # mpiexec's status as a shell would report it; 128 + n for signal n
    timed_out: bool = False  # whether the job was ended because of its time limit
    interrupted: int | None = None  # the first signal that this process got meanwhile
    # Of the ranks, in order of arrival.
    events: list[Event] = field(default_factory=list)
    # The lost ranks that mpiexec reports.
    lost: list[LostProcess] = field(default_factory=list)
    tail: bytes = b""  # the end of the output, without events
    command: Sequence[str] = ()  # the command that was run
    restarts: int = 0  # how often the job had been run before

    @property
    def text(self) -> str:
        """The end of the output as text."""
        return self.tail.decode(errors="replace")

    def first_of(self, kind: str) -> dict[int, Event]:
        """Return each rank's first event of a kind, in order of arrival."""
        found: dict[int, Event] = {}
        for event in self.events:
            if event.kind == kind:
                found.setdefault(event.rank, event)
        return found

    def lost_ranks(self) -> dict[int, LostProcess]:
        """Return the ranks of this job that mpiexec reports as lost.

        Ranks may print such reports, too, about jobs that they start, or from an old
        log. So only processes of this job's ranks count.
        """
        started = self.first_of("started")
        found: dict[int, LostProcess] = {}
        for lost in self.lost:
            # Two hosts may have a process of this number.
            ranks = [rank for rank in started if started[rank]["pid"] == lost.pid]
            if lost.rank is not None and (ranks or lost.pid is None):
                ranks = [lost.rank]
            if len(ranks) == 1:
                found.setdefault(ranks[0], lost)
        return found

    def has_failed(self) -> bool:
        """Return whether a rank, or a monitor, has reported a failure so far."""
        return any(event.kind in FAILURES for event in self.events)


def run_job(
    args: Sequence[str],
    env: Mapping[str, str],
    *,
    # Number of reports which say that all ranks have finished.
    ranks: int | None = None,
    timeout: float | None = None,  # seconds after which the job is ended
    # This list grows while the job runs: one signal ends the job, and another one kills
    # it.
    signals: Sequence[int] = (),
    # Seconds between a signal that warns and the job's end, for the ranks to save and
    # leave.
    grace: float = GRACE_SECONDS,
    forward: bool = True,  # otherwise the output is collected, and there is no input
    term_grace: float = TERM_GRACE_SECONDS,
) -> JobOutput:
    """Run an `mpiexec_command`, and pass on or collect its output; nothing is left on this host.

    Raise OSError if the output can't be written.
    """
    running_job = _Job(ranks, signals, grace, forward, term_grace)
    if timeout is not None:
        running_job.limit = time.monotonic() + timeout
    command = [*DYING_WITH_PARENT, str(os.getpid()), *args]
    with (
        _input(forward) as stdin,
        running(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**env, JOB_VARIABLE: running_job.name},
        ) as process,
    ):
        running_job.pump(process)
    output = running_job.output
    output.status = process.returncode
    if running_job.killed_at < math.inf and running_job.has_finished():
        output.status = 0  # only processes that ranks had left were ended
    elif output.status < 0:
        output.status = SIGNAL_STATUS - output.status
    if signals:
        output.interrupted = signals[0]
    output.tail = bytes(running_job.tail)
    output.lost = find_lost(output.tail)
    return output


class _Job:
    """Passes on the output of a job, and ends the job when it is time."""

    def __init__(
        self,
        ranks: int | None,
        signals: Sequence[int],
        grace: float,
        forward: bool,
        term_grace: float,
    ) -> None:
        self.name = secrets.token_hex(8)
        self.output = JobOutput()
        self.tail = bytearray()
        self.limit = math.inf
        self.killed_at = math.inf
        self._ranks = ranks
        self._signals = signals
        self._grace = grace
        self._forward = forward
        self._term_grace = term_grace
        self._decoders = [Decoder(self.name, self.output.events) for _ in range(2)]
        self._ends_at = math.inf  # after a failure or a signal
        self._is_interrupted = False

    def pump(self, process: subprocess.Popen[bytes]) -> None:
        """Pass output on until the program has ended, and soon after it all that it left."""
        # Writing blocks while a pager is idle, but the time limit still holds.
        threading.Thread(target=self._keep_time, args=(process,), daemon=True).start()
        exited_at = math.inf
        with selectors.DefaultSelector() as selector:
            for number, pipe in enumerate((process.stdout, process.stderr)):
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ, number)
            while selector.get_map() or process.poll() is None:
                for key, _ in selector.select(POLL_SECONDS):
                    data = os.read(key.fd, READ_BYTES)
                    if not data:
                        selector.unregister(key.fileobj)
                    self._take(key.data, data)
                now = time.monotonic()
                # A process that waits for a disk can't be killed.
                if process.poll() is not None or now > self.killed_at + LINGER_SECONDS:
                    exited_at = min(exited_at, now)
                    if now > exited_at + LINGER_SECONDS:
                        return

    def has_finished(self) -> bool:
        """Return whether all ranks have reported that they finished."""
        return len(self.output.first_of("finished")) == self._ranks

    def _take(self, stream: int, data: bytes) -> None:
        shown = self._decoders[stream].feed(data)
        self.tail += shown
        del self.tail[:-TAIL_BYTES]
        if self._forward:
            target = (sys.stdout, sys.stderr)[stream]
            target.buffer.write(shown)
            target.flush()

    def _keep_time(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            self._look(process, time.monotonic())
            time.sleep(POLL_SECONDS)

    def _look(self, process: subprocess.Popen[bytes], now: float) -> None:
        """Warn, end or kill the job, if it is time."""
        if self._signals and not self._is_interrupted:
            self._is_interrupted = True
            self._ends_at = now
            if self._signals[0] in WARNINGS:
                # Mpiexec passes the signal on to its ranks.
                process.send_signal(signal.SIGUSR1)
                self._ends_at += self._grace
        elif self._ends_at == math.inf:
            if self.output.has_failed():
                self._ends_at = now + FAILED_SECONDS
            elif self.has_finished():
                self._ends_at = now + FINISHED_SECONDS
            elif now > self.limit:
                self.output.timed_out = True
                self._ends_at = now
        # A scheduler and a launcher may each send a signal of their own: none is repeated.
        if len(self._signals) > len(set(self._signals)) or now > self.killed_at:
            process.kill()
        elif self.killed_at == math.inf and now > self._ends_at:
            self.killed_at = now + self._term_grace
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)


@contextlib.contextmanager
def _input(forward: bool) -> Iterator[Any]:
    """Yield what a job reads: this process's input, or nothing.

    A terminal stops or refuses processes outside of its foreground, where a job's own
    session never is. So a process beside this one reads the terminal. In the background
    that process gets an error, after which the job reads no more, instead of a signal,
    which would stop this process, too.
    """
    if not forward or sys.stdin is None:
        yield subprocess.DEVNULL
    elif not sys.stdin.isatty():
        yield None
    else:
        command = ["sh", "-c", "trap '' TTIN; exec cat 2>/dev/null"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
            try:
                yield reader.stdout
            finally:
                reader.kill()
