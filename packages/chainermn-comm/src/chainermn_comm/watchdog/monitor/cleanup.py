"""Removes the files in shared memory that a job has left on a machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from .. import processes

FOLDER = "/dev/shm/"
# The beginnings of file names that MPICH, Open MPI, UCX, NCCL and Python use for one job.
# Other files, such as data sets, belong to the user and are never removed.
MADE_FOR_A_JOB = (
    "mpich_shm_",
    "mpich_shar_tmp",
    "sm_segment.",
    "osc_rdma.",
    "vader_segment.",
    "ucx_shm_",
    "nccl-",
    "sem.mp-",
)
# Time for ended processes to be gone: until then their files are in use.
WAIT_SECONDS = 3.0
# Seconds between two scans, which read the maps of all ranks; the time doubles each time.
SCAN_SECONDS, LONGEST_SCAN_SECONDS = 0.5, 30.0


class SharedFiles:
    """The files in shared memory that a job's ranks on this machine have made.

    Which processes have mapped a file is known only while a rank lives: call `scan`
    before.
    """

    def __init__(self) -> None:
        self._ranks: list[int] = []  # the numbers of their processes
        self._inodes: dict[str, int] = {}  # the files' inodes, by name
        self._scan_at = 0.0
        self._pause = SCAN_SECONDS

    def scan_if_due(self, ranks: list[int], now: float) -> None:
        """Scan now and then, and soon after a rank has come, because it then makes files."""
        if ranks != self._ranks:
            self._ranks = ranks
            self._scan_at = now
            self._pause = SCAN_SECONDS
        if now >= self._scan_at:
            self.scan()
            self._scan_at = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_SCAN_SECONDS)

    def scan(self) -> None:
        """Record the files that the ranks have mapped now."""
        with contextlib.suppress(OSError):
            mapped = _mapped(self._ranks)
            # Under their present names, since semaphores change names.
            with os.scandir(FOLDER) as files:
                for file in files:
                    if file.inode() in mapped and file.name.startswith(MADE_FOR_A_JOB):
                        self._inodes[file.name] = file.inode()

    def remove(self) -> bool:
        """Remove the files that no process has mapped; return whether no file is left."""
        if not self._inodes:
            return True
        try:
            in_use = _mapped(processes.all_stats())
        except OSError:  # for example, no descriptor is left
            return False
        for name, inode in list(self._inodes.items()):
            with contextlib.suppress(OSError):
                found = os.lstat(FOLDER + name)
                if found.st_ino == inode and found.st_uid == os.geteuid():
                    if inode in in_use:
                        continue
                    os.unlink(FOLDER + name)
            del self._inodes[name]  # the file is gone, or belongs to somebody else
        return not self._inodes


def _mapped(pids: Iterable[int]) -> set[int]:
    """Return the inodes of shared memory that processes have mapped, as far as we may know."""
    found = set()
    for pid in pids:
        with (
            contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError),
            open(f"/proc/{pid}/maps", errors="replace") as maps,
        ):
            for line in maps:
                if FOLDER in line:
                    found.add(int(line.split()[4]))
    return found
