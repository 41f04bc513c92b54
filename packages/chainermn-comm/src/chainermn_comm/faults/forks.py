"""Lets a child that a rank forked end without touching the rank's MPI.

mpi4py calls `MPI_Finalize` when an interpreter ends, in a forked child too. There it takes the
parent's place among the ranks: on MPICH that ends the job, on Open MPI the child hangs. And MPI's
exit handlers release what the parent still uses. So such a child runs Python's exit functions and
leaves by `os._exit`, as those of `multiprocessing` do.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
from typing import Any

from _chainermn_events import exit_code

from . import exit_status

real_exit = os._exit  # abort.py replaces the one in os
_exit_codes: list[object] = []  # of the SystemExit that ends this child
_last_value: Any = None  # sys.last_value before the fork


@functools.cache  # once
def skip_finalize_in_forks() -> None:
    """Keep every child that this process forks from now on from finalizing MPI when it ends."""
    os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    global _last_value
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    _exit_codes.clear()
    _last_value = getattr(sys, "last_value", None)
    exit_status.unwatch()  # what the abort hook watches for is not for a child
    exit_status.watch(_exit_codes.append)
    try:
        # Runs before all exit functions, and only it does whatever else is registered.
        threading._register_atexit(_register_exit)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # it isn't promised; or Python is ending already
        _register_exit()


def _register_exit() -> None:
    atexit.unregister(_exit_without_mpi)  # a child's child inherits its parent's
    atexit.register(_exit_without_mpi)


def _exit_without_mpi() -> None:
    """Do the rest of the interpreter's exit without MPI; runs before all other exit functions."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        return  # it leaves by os._exit itself
    atexit.unregister(_exit_without_mpi)
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        status = exit_code(_exit_codes[-1] if _exit_codes else None)
        error = getattr(sys, "last_value", None)
        if error is not _last_value:
            status = 130 if isinstance(error, KeyboardInterrupt) else 1
        real_exit(status)
