"""Removes what a job has left here: shared memory, and after a bad end processes and folders."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable

from . import processes
from .launcher import Launcher
from .processes import GONE

FOLDER = "/dev/shm/"
# Files that MPICH, Open MPI, UCX, NCCL and Python's multiprocessing make for one job and name
# themselves. What else a rank has mapped, such as a data set, is its user's.
MADE_FOR_A_JOB = (
    "mpich_shm_",
    "mpich_shar_tmp",
    "sm_segment.",
    "osc_rdma.",
    "vader_segment.",
    "ucx_shm_",
    "nccl-",
    "sem.mp-",
    "psm_",
)
# For the launcher, whose task it is, to end the children of ranks.
LAUNCHER_SECONDS = 1.0
# For processes that were ended to be gone: until then a file is in use.
WAIT_SECONDS = 3.0
# For a daemon of the launcher to hear from it that the job is over, unless a link is cut.
DAEMON_SECONDS = 5.0
# For `chainermn launch`, or whoever started it, to end a launcher that a cut link keeps waiting.
FOLDER_SECONDS = 20.0
# So often at most the files are looked at while others make some.
PAUSE_SECONDS = 0.02
# Of Linux's inotify: a name was made.
IN_CREATE, IN_MOVED_TO = 0x100, 0x80
# By so much a clock may be set back during a job.
CLOCK_SECONDS = 2.0


class SharedFiles:
    """The files in shared memory that ranks of this machine have mapped.

    The kernel tells of them only while a rank lives, so this must be asked for them before.
    """

    def __init__(self, ranks: list[tuple[int, int]]) -> None:
        """Look at processes, given by number and birth."""
        self._ranks = ranks
        self._known: dict[str, tuple[int, int]] = {}
        libc = ctypes.CDLL(None)
        # A file that tells when another one is made; -1 if there is none.
        self.news: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        libc.inotify_add_watch(self.news, FOLDER.encode(), IN_CREATE | IN_MOVED_TO)
        started = min((birth for _, birth in ranks), default=0) / os.sysconf("SC_CLK_TCK")
        self._made_since = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + started
        self.look()

    def look(self) -> None:
        """Note what is mapped now."""
        with contextlib.suppress(OSError):
            self._known.update(_named(set().union(*(_mapped(pid) for pid, _ in self._ranks))))

    def look_at_news(self) -> None:
        """The same after files were made."""
        time.sleep(PAUSE_SECONDS)
        with contextlib.suppress(OSError):
            os.read(self.news, 1 << 16)
        self.look()

    def remove(self) -> bool:
        """Remove those that nobody uses; whether none is left that could be removed later."""
        in_use: set[tuple[int, int]] | None = None
        for name, identity in list(self._known.items()):
            try:
                found = os.lstat(FOLDER + name)
            except OSError:
                continue
            if (found.st_dev, found.st_ino) != identity or not self._is_ours(found):
                del self._known[name]
                continue
            if in_use is None:
                in_use = set().union(*map(_mapped, processes.numbers()))
            if identity not in in_use:
                with contextlib.suppress(OSError):
                    os.unlink(FOLDER + name)
                del self._known[name]
        return not any(os.path.lexists(FOLDER + name) for name in self._known)

    def _is_ours(self, found: os.stat_result) -> bool:
        made = found.st_ctime
        return found.st_uid == os.geteuid() and made >= self._made_since - CLOCK_SECONDS


def clean(
    files: SharedFiles, launcher: Launcher, ranks: list[tuple[int, int]], failed: bool
) -> None:
    """Leave nothing of ranks that are gone.

    Args:
        files: that they had mapped.
        launcher: of the ranks.
        ranks: their numbers and births.
        failed: whether they ended badly. After a good end their children may be meant to stay.
    """
    if failed:
        _wait(lambda: not _children(ranks), LAUNCHER_SECONDS)
        processes.end(_children(ranks), LAUNCHER_SECONDS)
    _wait(files.remove, WAIT_SECONDS)
    if failed:
        _wait(lambda: not launcher.is_left(), DAEMON_SECONDS)
        launcher.end(LAUNCHER_SECONDS)
        _wait(launcher.remove_folder, FOLDER_SECONDS)


def _wait(is_done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.05)


def _children(ranks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The living processes, by number and birth, of groups that ranks which are gone have led."""
    groups = {}
    for pid, birth in ranks:
        leader = processes.group_and_birth(pid)
        # Else another process has got the number since.
        if leader in (None, (pid, birth)) and processes.state(pid, birth) == GONE:
            groups[pid] = birth
    found = []
    for pid in processes.numbers() if groups else ():
        known = processes.group_and_birth(pid)
        if known and known[0] in groups and known[1] >= groups[known[0]]:
            found.append((pid, known[1]))
    return [one for one in found if processes.state(*one) != GONE]


def _mapped(pid: int) -> set[tuple[int, int]]:
    """Device and inode of the files of shared memory that a process has mapped."""
    found = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as maps:
        for line in maps:
            if FOLDER in line:
                _, _, _, device, inode, _ = line.split(None, 5)
                major, minor = (int(number, 16) for number in device.split(":"))
                found.add((os.makedev(major, minor), int(inode)))
    return found


def _named(mapped: set[tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Those that were made for a job, by their names now: semaphores change theirs."""
    device = os.stat(FOLDER).st_dev
    with os.scandir(FOLDER) as entries:
        found = {entry.name: (device, entry.inode()) for entry in entries}
    return {
        name: identity
        for name, identity in found.items()
        if name.startswith(MADE_FOR_A_JOB) and identity in mapped
    }
