"""What each rank of `chainermn launch` runs: the script, and a word before and after it.

    python -m chainermn_tools.launch.rank script.py arguments...

Without CHAINERMN_LAUNCH in the environment it only runs the script, as Python would.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import runpy
import socket
import struct
import sys
import termios
import time
import traceback
from types import TracebackType
from typing import Any

from chainermn_tools.jobs import JOB_VARIABLE, rank_from_env, unescape
from chainermn_tools.launch.records import frames

# How long to wait until the launcher has read what this rank wrote before, so that it reads a
# record's frame in one piece.
DRAIN_SECONDS = 2.0
# Of a traceback, and of its last line alone.
TRACEBACK_CHARACTERS, HEADLINE_CHARACTERS = 12_000, 500
OWN_FILES = (__file__, runpy.__file__, "<frozen runpy>")


class Voice:
    """Tells the launcher about this rank."""

    def __init__(self, launch: str) -> None:
        self._launch = launch
        self._rank = (rank_from_env() or (0, 1))[0]
        self._serial = 0
        self._stderr = os.dup(2)  # the script may put something else in its place

    def say(self, **record: Any) -> None:
        """Write a record; nothing is raised where the launcher is gone."""
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        for frame in frames(self._launch, self._rank, self._serial, record):
            self._drain()
            with contextlib.suppress(OSError):
                os.write(self._stderr, frame)
        self._serial += 1

    def _drain(self) -> None:
        end = time.monotonic() + DRAIN_SECONDS
        with contextlib.suppress(OSError):  # it is no pipe
            while time.monotonic() < end:
                unread = fcntl.ioctl(self._stderr, termios.FIONREAD, struct.pack("i", 0))
                if struct.unpack("i", unread)[0] == 0:
                    return
                time.sleep(0.001)


def main() -> None:
    """Run the script that the command line names, as `python script` would."""
    script, *arguments = (unescape(word) for word in sys.argv[1:])
    sys.argv[:] = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # somebody put another one there
            # Lines are then written whole, and ranks' lines don't mix.
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    launch = os.environ.get(JOB_VARIABLE)
    if launch is None:
        runpy.run_path(script, run_name="__main__")
        return
    voice = Voice(launch)
    voice.say(kind="hello", pid=os.getpid(), host=socket.gethostname())
    # First to be registered, so last to run: after the script's own.
    atexit.register(_say_goodbye, voice, os.getpid())
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        status = _status(error)
        if status:
            atexit.unregister(_say_goodbye)
            voice.say(kind="failed", status=status, **_described(error))
        raise


def _say_goodbye(voice: Voice, rank_process: int) -> None:
    """End MPI, which the others must do too, and only then say goodbye."""
    if os.getpid() != rank_process:
        return  # a process that the rank forked
    size = None
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        size = mpi.COMM_WORLD.size
        if sys.modules["mpi4py"].rc.finalize is not False:
            mpi.Finalize()
    voice.say(kind="goodbye", size=size)


def _status(error: BaseException) -> int:
    """The exit status that Python will end with because of this; 0 for success."""
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code & 0xFF or int(error.code != 0) if isinstance(error.code, int) else 1
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _described(error: BaseException) -> dict[str, Any]:
    """The error in words, and whether it may only be the echo of another rank's."""
    mpi = sys.modules.get("mpi4py.MPI")
    kinds = [kind.__name__ for kind in type(error).__mro__]
    echo = "PeerError" in kinds or (mpi is not None and isinstance(error, mpi.Exception))
    if isinstance(error, SystemExit):
        return {"what": f"sys.exit({error.code!r})"[:HEADLINE_CHARACTERS], "echo": echo}
    try:
        lines = traceback.format_exception(type(error), error, _of_script(error.__traceback__))
        only = traceback.format_exception_only(type(error), error)
        what = only[-1 if isinstance(error, SyntaxError) else 0].strip()
    except Exception:  # its __str__ fails
        lines, what = traceback.format_tb(error.__traceback__), kinds[0]
    return {
        "what": what.split("\n")[0][:HEADLINE_CHARACTERS],
        "echo": echo,
        "traceback": "".join(lines)[-TRACEBACK_CHARACTERS:],
    }


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in OWN_FILES:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
