"""Facts about processes, from `/proc`, and signals to them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

RUNNING = "running"
STOPPED = "stopped"
GONE = "gone"
# The name of a monitor's socket in Linux's abstract namespace; the name of its job
# follows, which begins with the number of the launcher's process.
MONITOR_NAME = "chainermn monitor "
# Time for the launcher to end the children of ranks, which is its task, and time for
# these children to end after SIGTERM.
LAUNCHER_SECONDS = 1.0
# Open MPI's daemon on each machine but the first.
DAEMON = "prted"
# If the daemon serves one job, a word of its command line begins so; a site's own daemons
# serve many.
ONE_JOB = "prterun-"
# In this time `mpiexec` tells the daemon that the job is over, unless a link is cut.
DAEMON_SECONDS = 5.0


class Peer(NamedTuple):
    """The process at the other end of a Unix socket."""

    pid: int
    user: int


class Stat(NamedTuple):
    """The facts about a process in `/proc/PID/stat`."""

    letter: str = "X"  # of its state
    parent: int = 0
    group: int = 0
    start: int = 0  # the time when the process began, in the kernel's ticks

    @property
    def is_gone(self) -> bool:
        return self.letter in "ZX"


def stat(pid: int) -> Stat:
    """Return the facts about a process, also if it is gone; OSError if they can't be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return Stat()
    fields = text.rpartition(")")[2].split()
    return Stat(fields[0], int(fields[1]), int(fields[2]), int(fields[19]))


def all_stats() -> dict[int, Stat]:
    """Return the facts about all processes that can be seen, by their numbers."""
    return {
        int(name): stat(int(name)) for name in os.listdir("/proc") if name.isdigit()
    }


def peer_of(connection: socket.socket) -> Peer:
    """Return the process at the other end of a connection."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, _ = struct.unpack("iII", found)
    return Peer(pid, user)


def state(pid: int) -> str:
    """Return RUNNING, STOPPED or GONE."""
    try:
        found = stat(pid)
    except OSError:
        # Such as too many open files, which says nothing about the process.
        return RUNNING
    if found.is_gone:
        return GONE
    return STOPPED if found.letter in "Tt" else RUNNING


def words(pid: int, of: str) -> list[str]:
    """Return the words of a process's "cmdline" or "environ", with which it was started."""
    return os.fsdecode(_read(f"/proc/{pid}/{of}")).split("\0")


def catches(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal, which would end it otherwise."""
    _, _, caught = _read(f"/proc/{pid}/status").partition(b"SigCgt:")
    if not caught:
        return False
    mask = int(caught.split()[0], 16)
    return bool(mask >> (number - 1) & 1)


def terminate(pids: Sequence[int], grace: float) -> None:
    """End processes: SIGTERM, and SIGKILL after ``grace`` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(OSError):  # the process is gone
                os.kill(pid, number)
        wait_until(lambda: all(state(pid) == GONE for pid in pids), grace, 0.02)


def end_children(ranks: list[int]) -> None:
    """End the child processes of ranks that are gone, if their launcher doesn't."""
    wait_until(lambda: not _children(ranks), LAUNCHER_SECONDS)
    terminate(_children(ranks), LAUNCHER_SECONDS)


def end_daemon(pid: int) -> None:
    """End Open MPI's daemon that launched the ranks, which would wait for ever after a cut link.

    The daemon is ended only if it serves this job alone, doesn't end by itself, and has no
    processes left.
    """
    command, *arguments = words(pid, "cmdline")
    is_daemon = os.path.basename(command) == DAEMON
    if not is_daemon or not any(word.startswith(ONE_JOB) for word in arguments):
        return
    if wait_until(lambda: state(pid) == GONE, DAEMON_SECONDS):
        return
    everyone = all_stats().values()
    if not any(it.parent == pid and not it.is_gone for it in everyone):
        terminate([pid], LAUNCHER_SECONDS)


def _children(ranks: list[int]) -> list[int]:
    """Return the living processes of process groups whose leader was a rank that is gone.

    As long as such a process lives, no other process gets the number of the rank.
    """
    everyone = all_stats()
    gone = [rank for rank in ranks if everyone.get(rank, Stat()).is_gone]
    return [
        child for child, it in everyone.items() if it.group in gone and not it.is_gone
    ]


def wait_until(
    is_done: Callable[[], bool], seconds: float, pause: float = 0.05
) -> bool:
    """Wait until it is done, but not longer; return whether it is."""
    deadline = time.monotonic() + seconds
    while not (done := is_done()) and time.monotonic() < deadline:
        time.sleep(pause)
    return done


def _read(path: str) -> bytes:
    """Return a file's contents; nothing if it can't be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
