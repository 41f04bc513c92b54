"""Removes what a job has left on a machine: shared memory, and after a failure processes."""

from __future__ import annotations

import contextlib
import math
import os

from .. import processes
from ..processes import GONE, Process, Stat

FOLDER = "/dev/shm/"
# How names of files begin that MPICH, Open MPI, UCX, NCCL and Python make for one job.
# Others, such as data sets, belong to the user and are never removed.
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
# For the launcher, whose task it is, to end the children of ranks.
LAUNCHER_SECONDS = 1.0
# For processes that were ended to be gone: until then a file is in use.
WAIT_SECONDS = 3.0
# For a daemon of the launcher to learn from it that the job is over, unless a link is
# cut.
DAEMON_SECONDS = 5.0
# Between two scans, which read the maps of all ranks: it doubles from one to the next.
SCAN_SECONDS, LONGEST_SCAN_SECONDS = 0.5, 30.0
# Open MPI's daemon on other machines than the first; in its command line, that it
# serves one job (a site's own serve many).
DAEMON = "prted"
ONE_JOB = "prterun-"

Identity = tuple[int, int]  # device and inode


class SharedFiles:
    """The files in shared memory that a job's ranks on this machine have made.

    Which processes have mapped a file is known only while a rank lives: call `scan`
    before.
    """

    def __init__(self) -> None:
        self._ranks: list[Process] = []
        self._known: dict[str, Identity] = {}
        self._scan_at = -math.inf
        self._pause = SCAN_SECONDS

    def add(self, rank: Process) -> None:
        """Watch another rank; files are made soon after it has come."""
        self._ranks.append(rank)
        self._scan_at = -math.inf
        self._pause = SCAN_SECONDS

    def keep(self, now: float) -> None:
        """Scan now and then."""
        if now >= self._scan_at:
            self.scan()
            self._scan_at = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_SCAN_SECONDS)

    def scan(self) -> None:
        """Record what the ranks have mapped now."""
        with contextlib.suppress(OSError):
            mapped = set().union(*(_mapped(pid) for pid, _ in self._ranks))
            device = os.stat(FOLDER).st_dev
            # By their names now: semaphores change theirs.
            with os.scandir(FOLDER) as entries:
                found = {one.name: (device, one.inode()) for one in entries}
            self._known |= {
                name: identity
                for name, identity in found.items()
                if name.startswith(MADE_FOR_A_JOB) and identity in mapped
            }

    def remove(self) -> bool:
        """Remove the files that no process has mapped; return whether that was all of them."""
        if not self._known:
            return True
        try:
            in_use = set().union(*map(_mapped, processes.all_stats()))
        except OSError:  # such as that no descriptor is left
            return False
        for name, identity in list(self._known.items()):
            with contextlib.suppress(OSError):
                found = os.lstat(FOLDER + name)
                is_ours = found.st_uid == os.geteuid()
                if is_ours and (found.st_dev, found.st_ino) == identity:
                    if identity in in_use:
                        continue
                    os.unlink(FOLDER + name)
            del self._known[name]  # it is gone, or somebody else's
        return not self._known


def end_daemon(pid: int) -> None:
    """End Open MPI's daemon that launched the ranks, which waits for ever where the link is cut.

    That is, if it serves this job alone, doesn't end by itself, and has no process any
    more.
    """
    words = processes.words(pid, "cmdline")
    if os.path.basename(words[0]) != DAEMON:
        return
    if not any(word.startswith(ONE_JOB) for word in words):
        return
    daemon = (pid, processes.stat(pid).start)
    processes.wait_until(lambda: processes.state(daemon) == GONE, DAEMON_SECONDS)
    everyone = processes.all_stats().values()
    if not any(it.parent == pid and not it.is_gone for it in everyone):
        processes.terminate([daemon], LAUNCHER_SECONDS)


def end_children(ranks: list[Process]) -> None:
    """End what processes of ranks that are gone have left, if their launcher doesn't."""
    processes.wait_until(lambda: not _children(ranks), LAUNCHER_SECONDS)
    processes.terminate(_children(ranks), LAUNCHER_SECONDS)


def _children(ranks: list[Process]) -> list[Process]:
    """Return the living processes of groups that ranks which are gone have led."""
    everyone = processes.all_stats()
    children = []
    for pid, start in ranks:
        leader = everyone.get(pid, Stat())
        if not leader.is_gone or leader.start not in (0, start):
            continue  # it lives, or another process has got its number since
        children += [
            (child, it.start)
            for child, it in everyone.items()
            if it.group == pid and not it.is_gone and it.start >= start
        ]
    return children


def _mapped(pid: int) -> set[Identity]:
    """Return the files of shared memory that a process has mapped, as far as we may know."""
    found = set()
    with (
        contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError),
        open(f"/proc/{pid}/maps", errors="replace") as maps,
    ):
        for line in maps:
            if FOLDER in line:
                _, _, _, device, inode, _ = line.split(None, 5)
                major, minor = (int(number, 16) for number in device.split(":"))
                found.add((os.makedev(major, minor), int(inode)))
    return found
