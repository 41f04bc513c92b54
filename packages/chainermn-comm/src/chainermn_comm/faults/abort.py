"""Ends the whole job, with a failing status, when one rank fails while others may wait for it.

A rank that ends by an uncaught exception or by `sys.exit(3)` goes on to `MPI_Finalize`,
where it and the other ranks wait for each other. So such a rank prints what happened
and calls `MPI_Abort`. The launcher notices signals and kills.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import os
import re
import socket
import sys
import time
import zlib
from types import TracebackType
from typing import NoReturn

from _chainermn_events import MOST_CHARACTERS, active_job, emit, exit_code
from _chainermn_verdict import is_secondary, next_step, traceback_of, users_lines

from ..environment import ABORT_VARIABLE, switch
from ..errors import describe_exception
from ..watchdog import job_name, mark_aborting, mark_finalizing
from . import system_exit
from .forks import flush_output, real_exit

# Tells the child processes of a rank that they are no ranks. They inherit the
# launcher's variables, but a second MPI_Init under the same rank number fails.
RANK_PROCESS = "CHAINERMN_RANK_PROCESS"
# In these seconds a rank whose error may only follow from another rank's error is ended
# silently.
SECONDARY_ERROR_SECONDS = 1.5
# Between the report and MPI_Abort: MPICH's launcher drops all text that it has not read
# by then, and other ranks that fail can print their reports; see docs/decisions/failures.md.
FORWARDING_SECONDS = 0.5
# Ranks that fail at the same time write in turns, because Open MPI's launcher mixes texts
# longer than 4 kB. There are only TURNS turns, so that the last rank isn't late.
TURN_SECONDS, TURNS = 0.04, 8
# After this time the process ends even if MPI_Abort hangs; then the launcher ends the
# other ranks.
LAST_RESORT_SECONDS = 3.0
_process = 0  # the process whose failures our hooks report
_previous = sys.__excepthook__  # the hook that ours has replaced
_leaving = 0  # the exit status with which all ranks have agreed to leave


def add_hook() -> None:
    """From now on, end the whole job when this rank fails, whatever the environment says.

    A failure is an uncaught exception in the main thread, `SystemExit` with another
    code than 0 or None, or `os._exit` before MPI is finalized. The rank prints its
    number and what happened, for an exception with the traceback; if a program has set
    `sys.excepthook`, that hook prints it. Then the rank calls `MPI_Abort` with the
    exit's own code (130 for Ctrl-C), or 1 if there is none. Nothing changes with one
    rank, in an interactive interpreter, in a child process of a rank, or after MPI's end.

    The call initializes MPI, as importing `mpi4py.MPI` does, because a rank that fails
    before `MPI_Init` leaves the others waiting there. It is not collective, but should
    be made on every rank. It raises no errors of its own.
    """
    process = str(os.getpid())
    if os.environ.get(RANK_PROCESS, process) != process:
        return
    from mpi4py import MPI

    if MPI.Is_initialized() and MPI.COMM_WORLD.size > 1:
        os.environ[RANK_PROCESS] = process
    _install()


def install_by_default() -> None:
    """Install the hook if there are several ranks, unless the environment refuses it.

    The function is called when a communicator is created. The number of ranks is that of
    MPI's world, since other ranks may wait for a rank whose communicator has no others.
    """
    from mpi4py import MPI

    if MPI.COMM_WORLD.size > 1 and _wanted() is not False:
        _install()


def install_if_forced() -> None:
    """Do :func:`add_hook` if the environment asks for it; otherwise MPI isn't initialized."""
    if _wanted():
        add_hook()


def abort_if_desynchronized() -> None:
    """Abort the job because of the current exception, if other ranks may wait for this rank.

    The function is for exceptions between steps that all ranks take together, such as a
    signal handler's.
    """
    error = sys.exception()
    if error is None or not _others_may_wait():
        return
    if isinstance(error, SystemExit):
        abort_job(f"sys.exit({error.code})", exit_code(error.code) or 1)
    _excepthook(type(error), error, error.__traceback__)


def leave(code: int) -> NoReturn:
    """Raise SystemExit(code) without aborting the job, because all ranks do so together."""
    global _leaving
    _leaving = code
    raise SystemExit(code)


def _wanted() -> bool | None:
    """Return whether the environment wants the hook; None if it doesn't say."""
    try:
        return switch(ABORT_VARIABLE)
    except ValueError:  # `create_communicator` raises this error on all ranks
        return False


def _install() -> None:
    global _previous, _process
    if _process or _is_interactive():
        return
    _process = os.getpid()
    _previous = sys.excepthook
    sys.excepthook = _excepthook
    os._exit = _os_exit
    system_exit.watch(_on_system_exit)
    atexit.register(_at_exit)


def _is_interactive() -> bool:
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def _others_may_wait() -> bool:
    """Return whether this process is a rank among several, with MPI running."""
    mpi = sys.modules.get("mpi4py.MPI")
    return (
        _process == os.getpid()  # else it is a forked child, which is no rank
        and not _is_interactive()
        and mpi is not None
        and mpi.Is_initialized()
        and not mpi.Is_finalized()
        and mpi.COMM_WORLD.size > 1
    )


# How this process ends.


def _excepthook(
    kind: type[BaseException], value: BaseException, trace: TracebackType | None
) -> None:
    if not _others_may_wait():
        _previous(kind, value, trace)
        return
    what = f"uncaught {kind.__name__}"
    details = ""
    code = 1
    if issubclass(kind, KeyboardInterrupt):
        code = 130  # 128 + SIGINT, as in a shell
    try:
        if is_secondary(value):
            time.sleep(SECONDARY_ERROR_SECONDS)
        what = f"uncaught {describe_exception(value)}".rstrip(": ").partition("\n")[0]
        if _previous is sys.__excepthook__:
            details = traceback_of(value)
        else:  # don't collect the text first, because the hook may not return
            _write_stderr(f"\n{_headline(what)}:\n")
            _previous(kind, value, trace)
    finally:
        abort_job(what, code, details)


def _on_system_exit(code: object) -> None:
    status = exit_code(code)
    if status in (0, _leaving) or not _others_may_wait():
        return
    if isinstance(code, int):
        abort_job(f"sys.exit({code})", status)
    abort_job("sys.exit with a message", status, f"{code}\n")


def _os_exit(status: int) -> NoReturn:
    try:
        if _others_may_wait():
            # MPICH's launcher kills the other ranks and reports success after
            # os._exit(0).
            abort_job(
                f"os._exit({status}) before MPI was finalized", exit_code(status) or 1
            )
        mark_finalizing()
    finally:
        real_exit(status)


def _at_exit() -> None:
    """Catch an exception whose report went to an excepthook that somebody set after ours."""
    trace = getattr(sys, "last_traceback", None)
    if trace is not None and trace.tb_frame.f_back is None and _others_may_wait():
        abort_job(f"uncaught {type(sys.last_value).__name__}", 1)


# How the job ends.


def abort_job(what: str, code: int, details: str = "") -> NoReturn:
    """Print why this rank fails and abort the job with an exit status from 1 to 255.

    ``details``, such as a traceback, come first, and then the beginning of ``what``.
    """
    try:
        time.sleep(sys.modules["mpi4py.MPI"].COMM_WORLD.rank % TURNS * TURN_SECONDS)
        emit("aborted", what=what[:MOST_CHARACTERS], status=code)
        # Ctrl-C reaches each rank at a different line.
        said = what + details
        if code == 130:
            said = what
        if _is_first_to_say(said):
            text = f"\n{details}{_headline(what)}, ending the job.\n"
            if not active_job():  # otherwise the launcher prints the next step
                place = users_lines(details)[-1:]
                text += f"{next_step(what, *place)}\n"
            _write_stderr(text)
        time.sleep(FORWARDING_SECONDS)
    finally:  # the job ends even if a second Ctrl-C arrives meanwhile
        mpi_abort(code)


def _is_first_to_say(text: str) -> bool:
    """Return whether no other rank of this machine has printed the same text, ranks aside.

    The first rank binds a socket with a name from the text, until the rank ends.
    """
    text = re.sub(r"rank \d+", "", text)
    name = f"\0chainermn said {job_name()} {zlib.crc32(text.encode())}"
    said = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        said.bind(name)
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    said.detach()
    return True


def _headline(what: str) -> str:
    world = sys.modules["mpi4py.MPI"].COMM_WORLD
    return f"ChainerMN: rank {world.rank} of {world.size}: {what.partition(': ')[0]}"


def _write_stderr(text: str) -> None:
    flush_output()
    # In one piece, so that the launcher doesn't mix it with other ranks' output.
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def mpi_abort(code: int) -> NoReturn:
    """End the job by MPI_Abort, and this process even if MPI_Abort hangs or fails."""
    try:
        mark_aborting()
        faulthandler.dump_traceback_later(LAST_RESORT_SECONDS, exit=True, file=2)
        # MPICH's launcher may miss worker processes of this rank on a busy machine.
        # Whatever fails here, MPI_Abort must be called.
        with contextlib.suppress(Exception):
            for worker in sys.modules["multiprocessing"].active_children():
                worker.terminate()
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(code)
    finally:
        real_exit(code)
