"""Events that ranks report to whatever started their job, in the stream of standard error.

Standard error is the one way that leads from every host to the launcher without a shared folder
or an open port. An event is JSON between two control characters, cut into frames that a pipe
carries in one piece. It imports nothing of `chainermn_comm`, which loads MPI.

| event | emitted by | fields |
|---|---|---|
| ``started`` | the wrapper of a rank's script | ``pid``, ``host`` |
| ``finished`` | the wrapper, after ``MPI_Finalize`` | ``size`` of MPI's world; None without MPI |
| ``failed`` | the wrapper | ``what``, ``status``, ``traceback``, ``secondary`` |
| ``exited`` | the wrapper, at ``os._exit`` | ``what``, ``status`` |
| ``aborted`` | the abort hook | ``what``, ``status`` |
| ``rank_lost`` | the watchdog | ``lost``, ``pid``, ``host``, ``how`` |
| ``watchdog_abort`` | the watchdog | ``reason`` |
| ``host_lost`` | the watchdog | ``host``, ``reason`` |
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
from typing import Any

VERSION = 1
# Identifies a job; events are emitted only where it is set.
JOB_VARIABLE = "CHAINERMN_LAUNCH"
# Where launchers tell a process its rank, and the number of ranks. SLURM_PROCID is none of
# them: the batch script has it too, where no MPI was started.
RANK_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE"),
)
MARK = "\x1e"
# A frame must stay below 4096 bytes, with marks and header: so much a pipe carries whole, and
# Open MPI's launcher reads at a time.
PART_CHARACTERS = 2000
# How long to wait until the launcher has read what this process wrote before, so that it reads
# a frame in one piece.
DRAIN_SECONDS = 2.0
# Events of one process have numbers in a range of its own, as a rank has several processes.
EVENTS_PER_PROCESS = 1 << 20

_count = itertools.count()
_stderr: int | None = None


def encode(job: str, rank: int, serial: int, event: dict[str, Any]) -> list[bytes]:
    """Return the frames of an event, each of which is to be written in one piece.

    Args:
        job: tells this job's events from any other text.
        rank: whose event it is.
        serial: number of the event, unique among the rank's.
        event: what JSON can hold.
    """
    text = json.dumps(event)  # all ASCII, without control characters
    parts = [text[at : at + PART_CHARACTERS] for at in range(0, len(text), PART_CHARACTERS)]
    return [
        f"{MARK}{job} {rank} {serial} {number} {len(parts)} {part}{MARK}\n".encode()
        for number, part in enumerate(parts)
    ]


def emit(kind: str, **fields: Any) -> None:
    """Write an event to standard error; do nothing where no launcher asked for events.

    Nothing is raised where the launcher is gone.

    Args:
        kind: of the event.
        fields: what JSON can hold.
    """
    global _stderr
    job = os.environ.get(JOB_VARIABLE)
    if not job:
        return
    numbers = (os.environ.get(variable, "") for variable, _ in RANK_VARIABLES)
    rank = next((int(number) for number in numbers if number.isdigit()), 0)
    event = {"version": VERSION, "event": kind, "rank": rank, **fields}
    serial = os.getpid() * EVENTS_PER_PROCESS + next(_count)
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        if _stderr is None:
            _stderr = os.dup(2)  # the script may put something else in its place
        for frame in encode(job, rank, serial, event):
            _drain(_stderr)
            os.write(_stderr, frame)


def _drain(stream: int) -> None:
    """Wait until the pipe is empty."""
    end = time.monotonic() + DRAIN_SECONDS
    with contextlib.suppress(OSError):  # it is no pipe
        while time.monotonic() < end:
            unread = fcntl.ioctl(stream, termios.FIONREAD, struct.pack("i", 0))
            if struct.unpack("i", unread)[0] == 0:
                return
            time.sleep(0.001)
