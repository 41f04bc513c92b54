"""What Open MPI's launcher of this machine's ranks leaves when it is killed, or cut off.

On the machine where the job was started that is `mpiexec` itself, on the others a daemon of its
own, which waits for the word of `mpiexec` for ever when the link to it is cut. Each has a folder
with sockets and files. Other launchers' helpers end by themselves.
"""

from __future__ import annotations

import contextlib
import os
import shutil

from . import processes
from .processes import GONE

# Of the daemon and, in its command line, of those that serve one job; a site's own, which serve
# many, are called otherwise.
DAEMON, ONE_JOB = "prted", "prterun-"


class Launcher:
    """The parent of a rank."""

    def __init__(self, rank: int) -> None:
        """Look at the launcher of a rank's process, while that lives."""
        pid = processes.parent(rank)
        self._process = pid, processes.born(pid)
        path = processes.variable(rank, "PMIX_SERVER_TMPDIR")
        self._folder = path if os.path.basename(path) in (f"ompi.{pid}", f"{DAEMON}.{pid}") else ""
        words = processes.words(pid)
        self._is_daemon = os.path.basename(words[0]) == DAEMON and any(
            word.startswith(ONE_JOB) for word in words
        )

    def is_left(self) -> bool:
        """Whether it is a daemon of this job and lives."""
        return self._is_daemon and processes.state(*self._process) != GONE

    def end(self, seconds: float) -> None:
        """End such a daemon, unless it still has ranks or other processes of the job.

        Args:
            seconds: from SIGTERM, at which it removes its folder, to SIGKILL.
        """
        if self.is_left() and not processes.children(self._process[0]):
            processes.end([self._process], seconds)

    def remove_folder(self) -> bool:
        """Remove its folder if it is gone without having done that; whether that is away."""
        with contextlib.suppress(OSError):
            if os.lstat(self._folder).st_uid != os.geteuid():
                return True
            if processes.state(*self._process) == GONE:
                shutil.rmtree(self._folder, ignore_errors=True)
        return not os.path.lexists(self._folder)
