"""Runs an mpiexec job to its end, and collects what its ranks and mpiexec report."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from _chainermn_events import GRACE_SECONDS, JOB_VARIABLE
from chainermn_tools.jobs.events import (
    Decoder,
    Event,
    LauncherReports,
    LostProcess,
    normalize_tags,
    write_logs,
)
from chainermn_tools.jobs.signals import WARNINGS
from chainermn_tools.jobs.supervisor import BoundedOutput, Request, supervise

# How long a job may go on once a rank reported that it failed, or others that one was
# lost: the abort hook ends it in about one second, but a rank that fails before MPI is
# initialized leaves the others waiting, and mpiexec itself waits for ever for a host
# whose link is cut.
FAILED_SECONDS = 4.0
# From SIGTERM to SIGKILL.
TERM_GRACE_SECONDS = 5.0
# After mpiexec has ended, output of its helpers may still be on its way.
LINGER_SECONDS = 1.0
# The end of the output, which is searched for known errors where no rank has started.
TAIL_BYTES = 1 << 16
# Events after which a job does not come to a good end; docs/decisions/launch.md lists
# all.
FAILURES = ("failed", "exited", "aborted", "rank_lost", "watchdog_abort")


@dataclass
class JobOutput:
    """How a job ended, and what was reported of it."""

    status: int = 1  # of mpiexec, as a shell would report it; 128 + n for signal n
    timed_out: bool = False  # whether it had to be ended because of its time limit
    interrupted: int | None = None  # the first signal that this process got meanwhile
    # Of the ranks, in order of arrival.
    events: list[Event] = field(default_factory=list)
    lost: list[LostProcess] = field(default_factory=list)  # which mpiexec reports
    tail: bytes = b""  # the end of the output
    stdout: str = ""  # without events; empty where it was passed on
    stderr: str = ""  # likewise
    command: Sequence[str] = ()  # that was run
    restarts: int = 0  # how often it had been run before

    def first_of(self, kind: str) -> dict[int, Event]:
        """Return each rank's first event of a kind, in order of arrival."""
        found: dict[int, Event] = {}
        for event in self.events:
            if event.kind == kind:
                found.setdefault(event.rank, event)
        return found

    def lost_ranks(self) -> dict[int, LostProcess]:
        """Return the ranks of this job that mpiexec reports as lost.

        Ranks may print such reports too, of jobs that they start, or from an old log.
        So the process must be one that started here, has not finished, and, on this
        host, is gone.
        """
        started, finished = self.first_of("started"), self.first_of("finished")
        found: dict[int, LostProcess] = {}
        for lost in self.lost:
            ranks = [
                rank for rank, event in started.items() if event["pid"] == lost.pid
            ]
            if lost.pid is None and lost.rank is not None:
                ranks = [lost.rank]
            if (
                len(ranks) != 1
                or ranks[0] in finished
                or lost.rank not in (None, ranks[0])
            ):
                continue
            event = started.get(ranks[0])
            if event is None or not _runs_here(event["pid"], event["host"]):
                found.setdefault(ranks[0], lost)
        return found

    def has_failed(self) -> bool:
        reported = any(event.kind in FAILURES for event in self.events)
        return reported or any(
            lost.pid is not None for lost in self.lost_ranks().values()
        )


def _runs_here(pid: int, host: str) -> bool:
    """Return whether a process is known to run; of other hosts nothing is known."""
    if host != socket.gethostname():
        return False
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def run_job(
    args: Sequence[str],
    env: Mapping[str, str],
    *,
    timeout: float | None = None,  # seconds after which it is ended
    # Grows meanwhile: one signal ends the job, another kills it.
    signals: Sequence[int] = (),
    # Seconds between a signal that warns and the job's end, for the ranks to save and
    # leave.
    grace: float = GRACE_SECONDS,
    tagged: bool = False,  # whether mpiexec was asked to begin each line with its rank
    forward: bool = True,  # else the output is collected, and there is no input
    to_stderr: bool = False,  # whether standard output is forwarded there, too
    # Where each rank's lines are also written, if they are tagged.
    log_dir: Path | None = None,
    term_grace: float = TERM_GRACE_SECONDS,
) -> JobOutput:
    """Run an `mpiexec_command`, and pass on or collect its output; nothing of it is left here.

    Raise OSError if mpiexec can't be started, or the output can't be written.
    """
    tag = (JOB_VARIABLE, secrets.token_hex(8))
    output = JobOutput()
    sinks = {1: BoundedOutput(), 2: BoundedOutput()}
    decoders = {stream: Decoder(tag[1], output.events) for stream in sinks}
    reports = {stream: LauncherReports(tagged) for stream in sinks}
    deadline = None if timeout is None else time.monotonic() + timeout
    unlogged = {1: b"", 2: b""}
    failed_at: float | None = None
    warned_at: float | None = None

    def take(stream: int, data: bytes) -> None:
        shown = decoders[stream].feed(data) if data else decoders[stream].close()
        reports[stream].feed(shown)
        output.lost = reports[1].lost + reports[2].lost
        if data and not shown:
            return
        shown = (
            normalize_tags(shown, os.path.basename(args[0]) == "srun")
            if tagged
            else shown
        )
        if log_dir is not None:
            unlogged[stream] = write_logs(
                log_dir, unlogged[stream] + shown + b"\n" * (not data)
            )
        output.tail = (output.tail + shown)[-TAIL_BYTES:]
        if forward:
            is_stdout = stream == 1 and not to_stderr
            target = sys.stdout.buffer if is_stdout else sys.stderr.buffer
            target.write(shown)
            target.flush()
        else:
            sinks[stream].feed(shown)

    def request() -> Request | None:
        nonlocal failed_at, warned_at
        now = time.monotonic()
        if failed_at is None and output.has_failed():
            failed_at = now
        if deadline is not None and now > deadline:
            output.timed_out = True
        if len(signals) > 1:
            return "kill"
        if signals and signals[0] in WARNINGS:
            warned_at = now if warned_at is None else warned_at
            if now - warned_at < grace:
                return "warn"
        failed = failed_at is not None and now - failed_at > FAILED_SECONDS
        return "terminate" if signals or failed or output.timed_out else None

    status = supervise(
        args,
        env=env,
        tag=tag,
        on_output=take,
        request=request,
        pass_stdin=forward and sys.stdin is not None,
        die_with_parent=True,
        term_grace=term_grace,
        linger=LINGER_SECONDS,
    )
    output.status = status if status >= 0 else 128 - status
    output.interrupted = signals[0] if signals else None
    output.stdout, output.stderr = sinks[1].text(), sinks[2].text()
    return output
