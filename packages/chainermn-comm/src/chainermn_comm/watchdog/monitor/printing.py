"""Where a monitor prints: it has no terminal of its own, and its ranks may be gone."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence

from .. import processes
from .local_ranks import MonitoredRank

# Time for a launcher to read what is printed.
PRINT_SECONDS = 4.0


def print_for(pids: Sequence[int], text: str, events: Sequence[bytes] = ()) -> None:
    """Print on the standard error of the first of these processes where that can be done.

    Each event is written in one piece.
    """

    def write() -> None:
        for file in standard_errors(pids):
            with contextlib.suppress(OSError), open(file, "wb", 0, closefd=False) as it:
                for event in events:
                    it.write(event)
                it.write(text.encode(errors="backslashreplace"))
                return

    # A launcher that is stopped reads nothing.
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(PRINT_SECONDS)


def launchers_of(rank: MonitoredRank) -> list[int]:
    """Return the parent of a rank's launcher, and the launcher.

    One whose standard error is a file comes last, as mpiexec would write over our text
    there.
    """
    pids = [processes.stat(rank.launcher).parent, rank.launcher]
    return sorted(pids, key=_writes_to_file)


def _writes_to_file(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISREG(os.stat(f"/proc/{pid}/fd/2").st_mode)
    return False


def standard_errors(pids: Iterable[int]) -> Iterator[int]:
    """Open the standard error of each of these processes, and close it after its use.

    The launcher waits until no process holds its pipe.
    """
    # A pipe that nobody reads can't be opened, instead of being waited for.
    how = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK
    for pid in pids:
        with contextlib.suppress(OSError):  # such as where it is a socket
            file = os.open(f"/proc/{pid}/fd/2", how)
            os.set_blocking(file, True)
            try:
                yield file
            finally:
                os.close(file)
