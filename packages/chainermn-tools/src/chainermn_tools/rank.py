"""What each rank runs: the script, and events that report how it started and how it ended.

    python -m chainermn_tools.rank script.py arguments...
    python -m chainermn_tools.rank -m module arguments...

Without CHAINERMN_LAUNCH in the environment it only runs the script, as Python would.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import re
import runpy
import signal
import socket
import sys
import traceback
from importlib import util
from typing import Any, NoReturn

from _chainermn_events import emit, exit_code, pass_warning_on, rank_from_env
from _chainermn_verdict import is_secondary, traceback_of
from chainermn_tools import long_events
from chainermn_tools.threads import divide_cores

# The most characters of a traceback's last line.
HEADLINE_CHARACTERS = 500
# Names the folder where each rank's output goes.
LOG_VARIABLE = "CHAINERMN_LOG_DIR"
# mpiexec takes an argument that is a colon for the end of one program and the start of
# another.
COLON = re.compile(r"\\*:")

_real_exit = os._exit


def main() -> None:
    """Run the script or module that the command line names, as `python` would."""
    words = [unescape(word) for word in sys.argv[1:]]
    is_module = words[0] == "-m"
    script, *arguments = words[is_module:]
    sys.argv[:] = [script, *arguments]
    if not is_module and not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    for stream in (sys.stdout, sys.stderr):
        # A start-up file may have replaced the stream.
        with contextlib.suppress(AttributeError, ValueError):
            # Lines are then written whole, and ranks' lines don't mix.
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    if LOG_VARIABLE in os.environ:
        _log_to(os.environ[LOG_VARIABLE])
    divide_cores()
    # In both places, because the abort hook prints by itself if nobody has set another
    # hook.
    sys.excepthook = sys.__excepthook__ = _print_error
    # Open MPI's own handlers would replace these.
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        faulthandler.enable(2, all_threads=False)  # a crash shows the Python line
    process = os.getpid()
    emit("started", pid=process, host=socket.gethostname())

    def exit_at_once(status: int) -> NoReturn:
        if os.getpid() == process:  # worker processes end this way
            emit("exited", what=f"os._exit({status})", status=status & 0xFF)
        _real_exit(status)

    os._exit = exit_at_once
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, pass_warning_on)
    # Registered first, so this function runs last, after the script's own functions.
    atexit.register(_finish, process)
    try:
        if is_module:
            _check_module(script)
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        status = _exit_status(error)
        if status:
            atexit.unregister(_finish)
            long_events.emit("failed", status=status, **_describe(error))
        raise


def _check_module(name: str) -> None:
    """Leave with a sentence if there is no such module; runpy would show its own lines."""
    try:
        spec = None
        if not name.startswith("."):
            spec = util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = util.find_spec(name)
        if spec is not None:
            return
    except ModuleNotFoundError as error:
        # The module itself needs another one.
        if not f"{name}.".startswith(f"{error.name}."):
            raise
    sys.exit(f"there is no module {name}")


def _log_to(folder: str) -> None:
    """Write what this rank prints to a file of the rank's own; events still reach the launcher."""
    rank, _ = rank_from_env() or (0, 1)
    path = f"{folder}/rank-{rank}.log"
    try:
        os.makedirs(folder, exist_ok=True)
        with open(path, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    except OSError as error:
        sys.exit(f"--log-dir: {path} can't be written: {error.strerror}")


def escape(argument: str) -> str:
    """Return an argument as mpiexec may see it; :func:`unescape` undoes it."""
    return f"\\{argument}" if COLON.fullmatch(argument) else argument


def unescape(argument: str) -> str:
    """Return what :func:`escape` was given."""
    return argument[1:] if COLON.fullmatch(argument) else argument


def _print_error(
    kind: type[BaseException], error: BaseException, trace: object
) -> None:
    sys.stderr.write(traceback_of(error))


def _finish(process: int) -> None:
    """Finalize MPI, which waits for the other ranks, and only then report success."""
    if os.getpid() != process:
        return  # a process that the rank forked
    size = None
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        size = mpi.COMM_WORLD.size
        if sys.modules["mpi4py"].rc.finalize is not False:
            mpi.Finalize()
    emit("finished", size=size)


def _exit_status(error: BaseException) -> int:
    """Return the exit status that Python will end with because of this; 0 for success."""
    if isinstance(error, SystemExit):
        return exit_code(error.code)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _describe(error: BaseException) -> dict[str, Any]:
    """Describe the error, and whether it may only be a consequence of another rank's."""
    if isinstance(error, SystemExit):
        what = f"sys.exit({error.code!r})"[:HEADLINE_CHARACTERS]
        return {"what": what, "secondary": False, "traceback": ""}
    try:
        only = traceback.format_exception_only(type(error), error)
        what = only[-1 if isinstance(error, SyntaxError) else 0]
        what = " ".join(what.split())[:HEADLINE_CHARACTERS]
        text = traceback_of(error)
    except Exception:  # the error's `__str__` fails
        what = type(error).__name__
        text = "".join(traceback.format_tb(error.__traceback__))
    return {"what": what, "secondary": is_secondary(error), "traceback": text}


if __name__ == "__main__":
    main()
