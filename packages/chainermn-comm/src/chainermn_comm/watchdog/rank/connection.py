"""The connection of a rank to the monitor of its machine, which the first rank starts.

That is the rank that binds a socket in Linux's abstract namespace, whose name all ranks
of the machine know. A rank connects before the ranks meet through MPI, and keeps the
connection: the kernel closes it when the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _chainermn_events import RANK_VARIABLES, active_job

from .. import processes
from ..timeout import Timeout
from . import recorder

# The parent package imports NumPy, which the monitor doesn't need, so the monitor gets an
# empty parent package.
PROGRAM = """
import os, sys, types
sys.path.append(os.path.dirname(sys.argv[1]))
package = sys.modules["chainermn_comm"] = types.ModuleType("chainermn_comm")
package.__path__ = [sys.argv[1]]
from chainermn_comm.watchdog.monitor import main
main()
"""
# Time for an interpreter to start on a busy machine; the job goes on after that.
START_SECONDS = 20.0
# Seconds between two looks whether another rank has started the monitor.
RETRY_SECONDS = 0.01
# How long a rank waits until the monitor takes a message.
SEND_SECONDS = 2.0
# Ranks of a machine connect at about the same time.
BACKLOG = 4096

_monitor: socket.socket | None = None


def is_connected() -> bool:
    """Return whether this rank is connected to a monitor."""
    return _monitor is not None


def connect(members: Sequence[int], timeout: Timeout) -> None:
    """Tell the monitor that this rank, the first of the ``members``, has come.

    Raises:
        OSError: the monitor can't be started in time, or this rank can't be watched.
    """
    global _monitor
    region = recorder.region()
    _monitor = _connection()
    description = {
        "kind": "come",
        "world": members[0],
        "pid": os.getpid(),
        "members": list(members),
        "timeout": asdict(timeout),
        # Not in the monitor's environment: `chainermn launch` kills the processes that have
        # the variable.
        "launch": active_job(),
    }
    tell_monitor(description, region.file, region.stacks)


def tell_monitor(message: dict[str, Any], *files: int) -> None:
    """Send the monitor a message and files, if there is one."""
    if _monitor is not None:
        with contextlib.suppress(OSError):  # the monitor is stopped or has been killed
            socket.send_fds(_monitor, [json.dumps(message).encode()], files)


def job_name() -> str:
    """Return a name that only the job's ranks on this machine share.

    The name begins with the number of the process that launched them.
    """
    launcher = os.getppid()
    variable = next((rank for rank, _ in RANK_VARIABLES if rank in os.environ), None)
    # A script may have started the rank; the launcher has no rank of its own.
    while variable and any(
        each.startswith(f"{variable}=") for each in processes.words(launcher, "environ")
    ):
        launcher = processes.stat(launcher).parent
    start = processes.stat(launcher).start
    # Containers may share sockets, and not see each other's processes.
    namespace = os.stat("/proc/self/ns/pid").st_ino
    # A launcher may serve several jobs.
    job = zlib.crc32(os.environ.get("PMIX_NAMESPACE", "").encode())
    return f"{launcher} {start} {namespace} {job}"


def _connection() -> socket.socket:
    """Return a connection to this machine's monitor, which is started if there is none."""
    name = f"\0{processes.MONITOR_NAME}{job_name()}"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(SEND_SECONDS)

    def connects() -> bool:
        if connection.connect_ex(name) == 0:
            return True
        _start_monitor(name)
        return False

    if not processes.wait_until(connects, START_SECONDS, RETRY_SECONDS):
        raise TimeoutError("their monitor doesn't listen")
    if processes.peer_of(connection).user != os.geteuid():
        raise PermissionError("another user has taken the monitor's name")
    return connection


def _start_monitor(name: str) -> None:
    """Start the monitor, unless another rank is about to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return
        listener.listen(BACKLOG)
        package = str(Path(__file__).resolve().parents[2])
        arguments = [package, str(listener.fileno()), str(os.getpid())]
        # It leaves its own child behind, which no `os.wait` of the script will
        # reap.
        try:
            status = subprocess.call(
                [sys.executable, "-I", "-S", "-c", PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # The launcher waits for every process that holds its pipe.
                stderr=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                cwd="/",
                # All that an interpreter needs to start.
                env={"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")},
                timeout=START_SECONDS,
            )
        # The error's message would contain the whole program.
        except subprocess.TimeoutExpired:
            raise TimeoutError("their monitor doesn't start") from None
        if status:
            raise OSError(f"their monitor ended with status {status}")


@atexit.register
def _leave_to_the_kernel() -> None:
    """Keep the connection open beyond Python's end, which would warn of an open socket."""
    if _monitor is not None:
        _monitor.detach()


def _leave_in_child() -> None:
    """Let the connection end with this rank, and not with a child that it forks."""
    global _monitor
    if _monitor is not None:
        _monitor.close()
    _monitor = None


os.register_at_fork(after_in_child=_leave_in_child)
