"""Events that a job sends to `chainermn launch`: lines of JSON in the ranks' standard error.

Without a shared folder or an open port, nothing else reaches the launcher from every
host. An event is a JSON object after a mark and the job's id; docs/decisions/tools.md
lists the kinds. Only the standard library is imported: a rank imports this file before
the script, and the monitor has nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Any

VERSION = 1
# Identifies the launch; only a job that `chainermn launch` has started has it.
JOB_VARIABLE = "CHAINERMN_LAUNCH"
# The launch and the rank's process, whose children inherit JOB_VARIABLE and must not
# speak for it.
REPORTER_VARIABLE = "CHAINERMN_LAUNCH_REPORTER"
# The variables in which launchers put a process's rank, and the number of ranks. Open
# MPI's come first: in a step of srun its mpiexec leaves PMI's as they are.
RANK_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
    # A shell of `srun --pty` has these variables, too.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
MARK = "\x1e"  # begins an event
# Exit statuses, as in docs/reference.md: nothing has started; all ranks have saved and
# left after a warning (EX_TEMPFAIL); a time limit (as of timeout(1)); the number that is
# added to a signal's.
NOT_STARTED_STATUS = 2
LEAVING_STATUS = 75
TIMEOUT_STATUS = 124
SIGNAL_STATUS = 128
# How many seconds ranks may take to save and leave after a warning.
GRACE_VARIABLE = "CHAINERMN_GRACE"
GRACE_SECONDS = 30.0
# How often `chainermn launch` has started the job again.
RESTARTS_VARIABLE = "CHAINERMN_RESTARTS"
# A pipe carries an event of this size whole, and Open MPI's launcher reads it at once.
MOST_BYTES = 4096
# The longest text in an event about a failure, so that the event fits in MOST_BYTES.
MOST_CHARACTERS = 500


def event_line(job: str, rank: int, kind: str, **fields: Any) -> bytes:
    """Return an event as a line, to be written in one piece; ``job`` is JOB_VARIABLE's value.

    ValueError is raised if the line is too long.
    """
    event = {"version": VERSION, "event": kind, "rank": rank, **fields}
    line = f"{MARK}{job} {json.dumps(event)}\n".encode()  # all ASCII
    if len(line) > MOST_BYTES:
        raise ValueError(f"an event {kind!r} of {len(line)} bytes is too long")
    return line


def emit(kind: str, **fields: Any) -> None:
    """Send an event about this rank to `chainermn launch`, if that started it; raise nothing."""
    job = active_job()
    if job is None:
        return
    # Standard error may be closed, or be an object of the script's.
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    with contextlib.suppress(Exception):
        rank, _ = rank_from_env() or (0, 1)
        os.write(_stderr, event_line(job, rank, kind, **fields))


def active_job() -> str | None:
    """Return the launch to which this process sends its rank's events; None if it sends none."""
    job = os.environ.get(JOB_VARIABLE)
    if job and os.environ.get(REPORTER_VARIABLE) == f"{job} {os.getpid()}":
        return job
    return None


def rank_from_env() -> tuple[int, int | None] | None:
    """Return this process's rank and the number of ranks, None if unknown, if it was launched."""
    for rank, size in RANK_VARIABLES:
        number = os.environ.get(rank, "")
        total = os.environ.get(size, "")
        if not number.isdigit():
            continue
        if rank == "SLURM_PROCID" and (total in ("", "1") or _is_in_slurms_shell()):
            continue
        if total.isdigit():
            return int(number), int(total)
        return int(number), None
    return None


def _is_in_slurms_shell() -> bool:
    """Return whether this process was started from a shell of `srun --pty`."""
    is_task = os.environ.get("SLURM_TASK_PID") == str(os.getpid())
    return "SLURM_PTY_PORT" in os.environ and not is_task


def exit_code(code: object) -> int:
    """Return the exit status, 0 to 255, of `SystemExit(code)`; never 0 for a failure."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF or int(code != 0)
    return 1


def _claim() -> int:
    """Let this process send events for its rank, if no other does; return its descriptor."""
    job = os.environ.get(JOB_VARIABLE)
    if job:
        if not os.environ.get(REPORTER_VARIABLE, "").startswith(f"{job} "):
            os.environ[REPORTER_VARIABLE] = f"{job} {os.getpid()}"
        with contextlib.suppress(OSError):
            return os.dup(2)  # a copy, since the script may replace the descriptor
    return 2


_stderr = _claim()


def pass_warning_on(*_: object) -> None:
    """Handle a launcher's SIGUSR1 as SIGTERM, which the launcher's mpiexec would not survive."""
    os.kill(os.getpid(), signal.SIGTERM)
