"""Ends the whole job, non-zero, when one rank ends in failure while others may wait for it.

MPI leaves the other ranks waiting when a rank ends by an uncaught exception or by
`sys.exit(3)`: it goes on to `MPI_Finalize`, which waits for them. Here that rank says what
happened and calls `MPI_Abort`. A signal or a kill is the launcher's to notice, and it does.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from . import exit_status
from .errors import PeerError

VARIABLE = "CHAINERMN_FORCE_ABORT_ON_EXCEPTION"
# Set for the children of a rank: they inherit VARIABLE and the launcher's variables, but a
# second MPI_Init under the same rank number fails.
RANK_PROCESS = "CHAINERMN_RANK_PROCESS"

# Between the report and MPI_Abort. MPICH's launcher drops what it has not read by then (lost
# were 1,200 of 5,000 lines in one of five runs without a pause), and ranks that fail at the same
# time get to say why.
FORWARDING_SECONDS = 0.5
# How long a rank whose error may only be the echo of another's waits to be ended silently.
ECHO_SECONDS = 1.5
# After this the process ends even if MPI_Abort hangs; the launcher then ends the others.
LAST_RESORT_SECONDS = 3.0


@dataclass(frozen=True)
class _Replaced:
    """What stood where our hooks are, and the process that they are for."""

    process: int
    excepthook: Any
    threading_excepthook: Any


_replaced: _Replaced | None = None
_real_exit = os._exit


def add_hook() -> None:
    """End the whole job when this rank fails; from now on, whatever the environment says.

    A failure is an uncaught exception in the main thread, `SystemExit` with another code than
    0 or None, or `os._exit` before MPI is finalized. The rank prints what happened, its number
    and the traceback, through `sys.excepthook` as it was if somebody had set it, and calls
    `MPI_Abort` with the exit's own code where it has one (Ctrl-C: 130), else 1. Python's own
    behaviour is left alone with one rank, in an interactive interpreter, in a forked child
    and once MPI is finalized.

    Initializes MPI, as importing `mpi4py.MPI` does. Calling it again changes nothing. Not
    collective, but meant to be called on every rank.
    """
    from mpi4py import MPI  # noqa: F401  (without MPI there would be nothing to abort)

    _install()


def remove_hook() -> None:
    """Undo :func:`add_hook`; hooks that others set since then stay."""
    global _replaced
    if _replaced is None:
        return
    if sys.excepthook is _excepthook:
        sys.excepthook = _replaced.excepthook
    if threading.excepthook is _threading_excepthook:
        threading.excepthook = _replaced.threading_excepthook
    if os._exit is _os_exit:
        os._exit = _real_exit
    exit_status.unwatch()
    atexit.unregister(_at_exit)
    _replaced = None


def install_by_default(mpi_comm: Any) -> None:
    """What creating a communicator does: :func:`add_hook`, unless refused or alone.

    Args:
        mpi_comm: the mpi4py communicator; with one rank nothing is done. Nor is anything
            done where ``CHAINERMN_FORCE_ABORT_ON_EXCEPTION`` is ``0``.
    """
    if mpi_comm.size > 1 and _wanted() is not False:
        _install()


def install_if_forced() -> None:
    """What importing the package does: :func:`add_hook` if the environment asks for it.

    ``CHAINERMN_FORCE_ABORT_ON_EXCEPTION=1`` asks. Only then is MPI initialized: a rank that
    fails before it has called ``MPI_Init`` leaves the others waiting in theirs.
    """
    process = str(os.getpid())
    if _wanted() and os.environ.get(RANK_PROCESS, process) == process:
        from mpi4py import MPI

        if MPI.COMM_WORLD.size > 1:
            os.environ[RANK_PROCESS] = process
        add_hook()


def end_job(what: str, code: int, details: str = "") -> NoReturn:
    """Say why this rank fails and abort the job.

    Args:
        what: what happened, to follow "rank 1 of 2: ".
        code: the job's exit status, 1 to 255.
        details: printed last, such as a traceback.
    """
    try:
        _say(f"{_headline(what)}, ending the job.\n{details}")
        _stop_workers()
        time.sleep(FORWARDING_SECONDS)
    finally:  # even if a second Ctrl-C arrives meanwhile
        _abort(code)


def _wanted() -> bool | None:
    """What the environment says: True, False, or None for nothing."""
    value = os.environ.get(VARIABLE, "").strip().lower()
    return None if not value else value not in ("0", "false", "no", "off")


def _install() -> None:
    global _replaced
    if _replaced is not None or _is_interactive():
        return
    _replaced = _Replaced(os.getpid(), sys.excepthook, threading.excepthook)
    sys.excepthook = _excepthook
    threading.excepthook = _threading_excepthook
    os._exit = _os_exit
    exit_status.watch(_on_system_exit)
    atexit.register(_at_exit)


def _is_interactive() -> bool:
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def _others_may_wait() -> bool:
    """Whether this process is a rank among several, with MPI running."""
    mpi = sys.modules.get("mpi4py.MPI")
    return (
        _replaced is not None
        and _replaced.process == os.getpid()  # else a forked child, which is no rank
        and not _is_interactive()
        and mpi is not None
        and mpi.Is_initialized()
        and not mpi.Is_finalized()
        and mpi.COMM_WORLD.size > 1
    )


# The ends that are watched.


def _excepthook(
    kind: type[BaseException], value: BaseException, trace: TracebackType | None
) -> None:
    assert _replaced is not None
    previous = _replaced.excepthook
    if not _others_may_wait():
        previous(kind, value, trace)
        return
    what, code = f"uncaught {kind.__name__}", 1
    if issubclass(kind, KeyboardInterrupt):
        code = 130  # 128 + SIGINT, as a shell reports it
    is_default = previous is sys.__excepthook__
    details = "".join(traceback.format_exception(kind, value, trace)) if is_default else ""
    try:
        if isinstance(value, (PeerError, sys.modules["mpi4py.MPI"].Exception)):
            time.sleep(ECHO_SECONDS)
        if not is_default:  # what it prints can't be collected first: it may not return
            _say(f"{_headline(what)}:\n")
            previous(kind, value, trace)
    finally:
        end_job(what, code, details)


def _threading_excepthook(args: threading.ExceptHookArgs) -> None:
    """Name the rank; the job goes on, as a Python process does when a thread ends."""
    assert _replaced is not None
    previous = _replaced.threading_excepthook
    if args.exc_type is SystemExit or not _others_may_wait():
        previous(args)
        return
    what = _headline(f"exception in thread {args.thread.name if args.thread else '?'}") + ":\n"
    if previous is threading.__excepthook__:
        trace = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        _say(what + "".join(trace))
    else:
        _say(what)
        previous(args)


def _on_system_exit(code: object) -> None:
    status = exit_status.as_status(code)
    if status and _others_may_wait():
        is_number = isinstance(code, int)
        end_job(
            f"sys.exit({code})" if is_number else "sys.exit with a message",
            status,
            "" if is_number else f"{code}\n",
        )


def _os_exit(status: int) -> NoReturn:
    try:
        if _others_may_wait():
            # MPICH's launcher kills the other ranks and reports success after os._exit(0).
            end_job(
                f"os._exit({status}) before MPI was finalized",
                exit_status.as_status(status) or 1,
                "Where this is meant, call mpi4py.MPI.Finalize() first.\n",
            )
    finally:
        _real_exit(status)


def _at_exit() -> None:
    """Catch an exception whose report went to an excepthook that somebody set after ours."""
    trace = getattr(sys, "last_traceback", None)
    if trace is not None and trace.tb_frame.f_back is None and _others_may_wait():
        end_job(f"uncaught {type(sys.last_value).__name__}", 1)


# How the job is ended.


def _headline(what: str) -> str:
    world = sys.modules["mpi4py.MPI"].COMM_WORLD
    return f"\nChainerMN: rank {world.rank} of {world.size}: {what}"


def _say(text: str) -> None:
    """Write in one piece, so that the launcher doesn't mix it with other ranks' words."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    try:
        sys.stderr.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:  # it may be closed, or somebody else's object
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))


def _stop_workers() -> None:
    """End the worker processes of this rank, which would wait for it for ever."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None:
        with contextlib.suppress(Exception):
            for worker in multiprocessing.active_children():
                worker.terminate()


def _abort(code: int) -> NoReturn:
    try:
        faulthandler.dump_traceback_later(LAST_RESORT_SECONDS, exit=True, file=2)
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(code)
    finally:
        _real_exit(code)
