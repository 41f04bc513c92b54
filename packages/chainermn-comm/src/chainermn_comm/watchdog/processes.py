"""Facts about processes, from `/proc`; signals to them; writing to their standard error.

A process is identified by its number and its start time, since numbers are used again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

RUNNING = "running"
STOPPED = "stopped"
GONE = "gone"
# What a monitor's socket in Linux's abstract namespace is called; the name of its job
# follows, which begins with the number of the launcher's process.
MONITOR_NAME = "chainermn monitor "
Process = tuple[int, int]  # number and start time


class Peer(NamedTuple):
    """The process at the other end of a Unix socket."""

    pid: int
    user: int


class Stat(NamedTuple):
    """What `/proc/PID/stat` says of a process."""

    letter: str = "X"  # of its state
    parent: int = 0
    group: int = 0
    start: int = 0  # time, in the kernel's ticks

    @property
    def is_gone(self) -> bool:
        return self.letter in "ZX"


def stat(pid: int) -> Stat:
    """Return what is known of a process; OSError if that can't be read, but not if it's gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return Stat()
    fields = text.rpartition(")")[2].split()
    if not fields:
        return Stat()
    return Stat(fields[0], int(fields[1]), int(fields[2]), int(fields[19]))


def all_stats() -> dict[int, Stat]:
    """Return what is known of all processes that can be seen, by their numbers."""
    return {
        int(name): stat(int(name)) for name in os.listdir("/proc") if name.isdigit()
    }


def peer_of(connection: socket.socket) -> Peer:
    """Return the process at the other end: the one that connected, or that listens."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, _ = struct.unpack("iII", found)
    return Peer(pid, user)


def state(process: Process) -> str:
    """Return RUNNING, STOPPED or GONE."""
    try:
        found = stat(process[0])
    except OSError:
        # Such as that no descriptor is left, which says nothing of the process.
        return RUNNING
    if found.is_gone or found.start != process[1]:
        return GONE
    return STOPPED if found.letter in "Tt" else RUNNING


def words(pid: int, of: str) -> list[str]:
    """Return the words of a process's "cmdline" or "environ"; an empty one if there are none."""
    return [os.fsdecode(word) for word in _read(f"/proc/{pid}/{of}").split(b"\0")]


def catches(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal, which would end it otherwise."""
    _, _, caught = _read(f"/proc/{pid}/status").partition(b"SigCgt:")
    if not caught:
        return False
    mask = int(caught.split()[0], 16)
    return bool(mask >> (number - 1) & 1)


def send_signal(process: Process, number: int) -> None:
    """Send a signal, unless the process is gone."""
    if state(process) != GONE:
        with contextlib.suppress(OSError):
            os.kill(process[0], number)


def terminate(processes: Sequence[Process], grace: float) -> None:
    """End processes: SIGTERM, and SIGKILL after ``grace`` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            send_signal(process, number)
        wait_until(lambda: all(state(one) == GONE for one in processes), grace, 0.02)


def wait_until(
    is_done: Callable[[], bool], seconds: float, pause: float = 0.05
) -> bool:
    """Wait until it is done, but not longer; return whether it is."""
    deadline = time.monotonic() + seconds
    while not (done := is_done()) and time.monotonic() < deadline:
        time.sleep(pause)
    return done


def write(file: int, text: str, seconds: float, events: Sequence[bytes] = ()) -> bool:
    """Write events, each in one piece, and a text; return whether they were read in time."""
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(file, select.POLLOUT)
    with contextlib.suppress(OSError):
        for data in (*events, text.encode(errors="backslashreplace")):
            while data and time.monotonic() < deadline:
                if poll.poll(100):
                    data = data[os.write(file, data[: select.PIPE_BUF]) :]
        return not data
    return False


def _read(path: str) -> bytes:
    """Return a file's contents; nothing if it can't be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
