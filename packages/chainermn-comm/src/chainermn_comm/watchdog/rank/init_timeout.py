"""Watches the making of the first communicator, which brings the ranks together for a monitor.

Until then no rank knows where others are, so each that waits keeps a thread. It binds a
socket, in Linux's abstract namespace, whose name the others of its machine know. The
first one reports.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import threading
import zlib
from collections.abc import Callable, Iterator

from _chainermn_events import RANK_VARIABLES, active_job, emit

from .. import processes
from ..report import init_report, reason
from ..timeout import Timeout
from . import recorder

RANK_NAMES = [rank for rank, _ in RANK_VARIABLES]
# From a report to the end, for the launcher to forward it; the other ranks wait for
# longer.
FIRST_SECONDS, OTHERS_SECONDS = 0.5, 2.0
_said: list[socket.socket] = []  # kept open until this process ends


@contextlib.contextmanager
def enforce_init_timeout(
    timeout: Timeout, members: list[int], abort: Callable[[], None]
) -> Iterator[None]:
    """Report, and end the job by ``abort`` if asked, when the ranks don't all come in time.

    ``members`` have to come, by their numbers in MPI.COMM_WORLD; this rank is the first
    of them.
    """
    done = threading.Event()

    def watch() -> None:
        if done.wait(timeout.seconds):
            return
        come = [rank for rank in sorted(members) if _has_come(rank)]
        is_first = come[:1] == members[:1]
        if is_first:
            missing = sorted({*members} - {*come})
            text = init_report(come, missing, timeout)
            if timeout.ends_job:
                emit("watchdog_abort", reason=reason(text))
                text = text.partition("Next step")[0] if active_job() else text
            processes.write(2, text, 2.0)
        if timeout.ends_job and not done.wait(
            FIRST_SECONDS if is_first else OTHERS_SECONDS
        ):
            abort()

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        with contextlib.suppress(OSError):
            if (
                timeout.seconds
                and len(members) > 1
                and not recorder.region().is_monitored
            ):
                own.bind(_name(members[0]))
                threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            done.set()


def is_first_here(text: str) -> bool:
    """Return whether no other rank here has asked for this text, but for the ranks it names."""
    try:
        _said.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        _said[-1].bind(_name(zlib.crc32(re.sub(r"rank \d+", "", text).encode()) << 32))
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def _has_come(rank: int) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        return other.connect_ex(_name(rank)) == 0


def _name(number: int) -> str:
    """Return the name of a rank's socket: that of its launcher's process, and the number."""
    launcher, name = (
        os.getppid(),
        next((it for it in RANK_NAMES if it in os.environ), ""),
    )
    while name and any(
        it.startswith(f"{name}=") for it in processes.words(launcher, "environ")
    ):
        launcher = processes.stat(launcher).parent
    return f"\0chainermn {launcher} {processes.stat(launcher).start} {number}"
