"""Aborts the job: prints why this rank fails, sends an event, and calls MPI_Abort."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time
from typing import NoReturn

from _chainermn_events import emit

from ..trace import flush_trace
from ..watchdog import mark_aborting

# Between the report and MPI_Abort. MPICH's launcher drops what it has not read by then, and ranks
# that fail at the same time get to print theirs; see docs/decisions/abort.md.
FORWARDING_SECONDS = 0.5
# Ranks that fail at the same time write one after the other: Open MPI's launcher reads 4 kB at
# a time and mixes longer texts. Only so many turns, so that the last isn't late.
TURN_SECONDS = 0.04
TURNS = 8
# After this the process ends even if MPI_Abort hangs; the launcher then ends the others.
LAST_RESORT_SECONDS = 3.0

real_exit = os._exit  # abort.py replaces the one in os


def abort_job(what: str, code: int, details: str = "") -> NoReturn:
    """Print why this rank fails and abort the job with an exit status from 1 to 255.

    ``what`` follows "rank 1 of 2: ", and ``details``, such as a traceback, come last.
    """
    try:
        time.sleep(sys.modules["mpi4py.MPI"].COMM_WORLD.rank % TURNS * TURN_SECONDS)
        emit("aborted", what=what, status=code)
        write_stderr(f"{headline(what)}, ending the job.\n{details}")
        time.sleep(FORWARDING_SECONDS)
    finally:  # even if a second Ctrl-C arrives meanwhile
        mpi_abort(code)


def headline(what: str) -> str:
    """Return the first line of what a rank prints before it aborts the job."""
    world = sys.modules["mpi4py.MPI"].COMM_WORLD
    return f"\nChainerMN: rank {world.rank} of {world.size}: {what}"


def write_stderr(text: str) -> None:
    """Write in one piece, so that the launcher doesn't mix it with other ranks' output."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    try:
        sys.stderr.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:  # it may be closed, or somebody else's object
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))


def mpi_abort(code: int) -> NoReturn:
    """End the job by MPI_Abort, and this process whatever MPI does."""
    try:
        mark_aborting()
        faulthandler.dump_traceback_later(LAST_RESORT_SECONDS, exit=True, file=2)
        flush_trace()
        # MPICH's launcher may miss worker processes of this rank on a busy machine.
        multiprocessing = sys.modules.get("multiprocessing")
        with contextlib.suppress(Exception):  # MPI_Abort must be called
            for worker in multiprocessing.active_children() if multiprocessing else ():
                worker.terminate()
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(code)
    finally:
        real_exit(code)
