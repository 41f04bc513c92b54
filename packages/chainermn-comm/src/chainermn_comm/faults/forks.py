"""Lets a child that a rank forked end without touching the rank's MPI.

mpi4py calls `MPI_Finalize` when an interpreter ends, in a forked child too. There it meets the
other ranks in the parent's place: on MPICH that ends the job, on Open MPI the child hangs. And
MPI's own exit handlers release what the parent still uses. So such a child runs Python's exit
functions and leaves by `os._exit`, as those of `multiprocessing` do.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import Any

from . import exit_status
from .job_abort import real_exit

_registered = False
_code: object = None  # of the SystemExit that ends this child
_earlier: Any = None  # the exception that sys.last_value told before the fork


def skip_finalize_in_forks() -> None:
    """Have every child that this process forks from now on leave MPI alone when it ends."""
    global _registered
    if not _registered:
        os.register_at_fork(after_in_child=_in_child)
        _registered = True


def _in_child() -> None:
    global _code, _earlier
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    _code, _earlier = None, getattr(sys, "last_value", None)
    exit_status.unwatch()  # what the abort hook watches for is not for a child
    exit_status.watch(_remember)
    try:
        # Runs before all exit functions, and only it does whatever else is registered.
        threading._register_atexit(_prepare_to_leave)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # it isn't promised; or Python is ending already
        _prepare_to_leave()


def _prepare_to_leave() -> None:
    atexit.unregister(_leave)  # a child's child inherits its parent's
    atexit.register(_leave)


def _remember(code: object) -> None:
    global _code
    _code = code


def _leave() -> None:
    """Do what is left of the interpreter's end without MPI. The first of all exit functions."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        return  # it leaves by os._exit itself
    atexit.unregister(_leave)
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        real_exit(_status())


def _status() -> int:
    error = getattr(sys, "last_value", None)
    if error is not _earlier:
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return exit_status.as_status(_code)
