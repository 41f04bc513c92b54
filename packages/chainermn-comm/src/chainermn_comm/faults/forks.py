"""Lets a child that a rank forked end without touching the rank's MPI.

mpi4py calls `MPI_Finalize` when an interpreter ends, also in a forked child. The child
then takes the parent's place among the ranks. On MPICH the job ends, and on Open MPI
the child hangs. So the child leaves by `os._exit`, as children of `multiprocessing` do,
before its parent's exit functions.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys

from _chainermn_events import exit_code

from . import system_exit

real_exit = os._exit  # abort.py replaces os._exit
_status = 0  # of the SystemExit that ends this child


@functools.cache  # once
def skip_finalize_in_forks() -> None:
    """Keep every child that this process forks from now on from finalizing MPI when it ends."""
    os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        sys.last_value = None  # set by an uncaught exception
        # This listener replaces the abort hook's.
        system_exit.watch(_note_status)
        atexit.register(_exit_without_mpi)


def _note_status(code: object) -> None:
    global _status
    _status = exit_code(code)


def flush_output() -> None:
    """Flush the buffers of Python's own streams."""
    for stream in (sys.stdout, sys.stderr):
        # The stream may be closed, or be an object of the script's.
        with contextlib.suppress(Exception):
            stream.flush()


def _exit_without_mpi() -> None:
    flush_output()
    if isinstance(sys.last_value, KeyboardInterrupt):
        real_exit(130)
    if sys.last_value is not None:
        real_exit(1)
    real_exit(_status)
