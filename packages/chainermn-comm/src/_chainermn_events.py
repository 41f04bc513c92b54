"""Events that a job sends to `chainermn launch`: lines of JSON in the ranks' standard error.

Nothing else reaches the launcher from any host without a shared folder or an open port. An event
is a JSON object with ``version``, ``event`` (its kind) and ``rank``; it is cut into frames that a
pipe carries whole. docs/decisions/launch.md lists the kinds and their fields.

It imports the standard library only, and nothing of `chainermn_comm`: a rank imports it before the
script, which may set variables for NumPy or MPI, and the watchdog's monitor has neither.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import struct
import sys
import termios
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an import that each rank would pay for
    from collections.abc import Sequence

VERSION = 1
# Identifies the launch; only a job that `chainermn launch` has started has it.
JOB_VARIABLE = "CHAINERMN_LAUNCH"
# The launch and the rank's process, whose children inherit JOB_VARIABLE and must not speak for it.
REPORTER_VARIABLE = "CHAINERMN_LAUNCH_REPORTER"
# The variables in which launchers put a process's rank, and the number of ranks. SLURM_PROCID is
# none of them: the batch script has it too, where no MPI was started.
RANK_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE"),
)
# Begins and ends a frame.
MARK = "\x1e"
# A whole frame stays below 4096 bytes, which a pipe carries and Open MPI's launcher reads at once.
PART_CHARACTERS = 2000
# For the launcher to read what was written before a frame, so that it reads that in one piece.
DRAIN_SECONDS = 2.0

_serials = itertools.count()


def encode(job: str, rank: int, serial: int, event: dict[str, Any]) -> list[bytes]:
    """Return an event as frames; each is to be written in one piece.

    ``job`` is JOB_VARIABLE's value, and ``serial`` a number that no other event of the rank has.
    """
    text = json.dumps(event)  # all ASCII, without control characters
    parts = [text[at : at + PART_CHARACTERS] for at in range(0, len(text), PART_CHARACTERS)]
    return [
        f"{MARK}{job} {rank} {serial} {number} {len(parts)} {part}{MARK}\n".encode()
        for number, part in enumerate(parts)
    ]


def emit(kind: str, **fields: Any) -> None:
    """Send an event about this rank to `chainermn launch`, if that started it; raise nothing."""
    job = active_job()
    if job is None:
        return
    with contextlib.suppress(Exception):  # it may be closed, or somebody else's object
        sys.stderr.flush()
    with contextlib.suppress(Exception):
        frames = event_frames(job, (rank_from_env() or (0, 1))[0], kind, **fields)
        write_frames(_stderr, frames, DRAIN_SECONDS * len(frames))


def event_frames(job: str, rank: int, kind: str, **fields: Any) -> list[bytes]:
    """Return the frames of a new event."""
    # The watchdog's monitor, another process, may send events for the same rank.
    serial = os.getpid() << 32 | next(_serials)
    return encode(job, rank, serial, {"version": VERSION, "event": kind, "rank": rank, **fields})


def write_frames(file: int, frames: Sequence[bytes], seconds: float) -> None:
    """Write frames, each once the reader has taken what a pipe held before or the time is over.

    ``seconds`` are for all frames together. OSError where the file can't be written.
    """
    end = time.monotonic() + seconds
    for frame in frames:
        with contextlib.suppress(OSError):  # it is no pipe
            while time.monotonic() < end:
                unread = fcntl.ioctl(file, termios.FIONREAD, struct.pack("i", 0))
                if struct.unpack("i", unread)[0] == 0:
                    break
                time.sleep(0.001)
        os.write(file, frame)


def active_job() -> str | None:
    """Return the launch to which this process sends its rank's events; None if it sends none."""
    job = os.environ.get(JOB_VARIABLE)
    return job if job and os.environ.get(REPORTER_VARIABLE) == f"{job} {os.getpid()}" else None


def rank_from_env() -> tuple[int, int] | None:
    """Return this process's rank and the number of ranks, if an MPI launcher started it."""
    for rank, size in RANK_VARIABLES:
        if os.environ.get(rank, "").isdigit():
            return int(os.environ[rank]), int(os.environ.get(size, "1"))
    return None


def exit_code(code: object) -> int:
    """Return the exit status, 0 to 255, of `SystemExit(code)`; 1 if 8 bits make 0 of a failure."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF or int(code != 0)
    return 1


def _claim() -> int:
    """Make this process the one that speaks for its rank if none does; return where it writes."""
    job = os.environ.get(JOB_VARIABLE)
    if job:
        if not os.environ.get(REPORTER_VARIABLE, "").startswith(f"{job} "):
            os.environ[REPORTER_VARIABLE] = f"{job} {os.getpid()}"
        with contextlib.suppress(OSError):
            return os.dup(2)  # in whose place the script may put something else
    return 2


_stderr = _claim()
