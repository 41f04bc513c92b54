"""Prints for a monitor, which has no terminal, and whose ranks may be gone."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

from .. import processes
from .local_ranks import MonitoredRank

# Time for a launcher to read the text.
PRINT_SECONDS = 4.0


def print_for(pids: Sequence[int], text: str, event: bytes = b"") -> None:
    """Print on the standard error of the first of these processes that has a usable one.

    The event is written in one piece.
    """

    def write() -> None:
        # Opening a pipe that nobody reads fails instead of waiting.
        how = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK
        for pid in pids:
            # For example, standard error is a socket.
            with contextlib.suppress(OSError):
                file = os.open(f"/proc/{pid}/fd/2", how)
                os.set_blocking(file, True)
                # Closed at once: the launcher waits until no process holds its pipe.
                with open(file, "wb", 0) as opened:
                    opened.write(event)
                    opened.write(text.encode(errors="backslashreplace"))
                    return

    # A launcher that is stopped reads nothing.
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(PRINT_SECONDS)


def launchers_of(rank: MonitoredRank) -> list[int]:
    """Return the parent of a rank's launcher, and the launcher.

    A process whose standard error is a file comes last, because mpiexec would overwrite
    our text there.
    """
    pids = [processes.stat(rank.launcher).parent, rank.launcher]
    return sorted(pids, key=lambda pid: os.path.isfile(f"/proc/{pid}/fd/2"))
