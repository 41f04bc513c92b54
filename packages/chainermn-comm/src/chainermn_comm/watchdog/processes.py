"""What the system tells of a process, from `/proc`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import time
from collections.abc import Sequence

from ..events import write_frames

RUNNING, STOPPED, GONE = "running", "stopped", "gone"


def born(pid: int) -> int:
    """When the process started, in the kernel's ticks; 0 when it is gone."""
    fields = _fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0


def state(pid: int, birth: int) -> str:
    """RUNNING, STOPPED or GONE; one of another birth has only the same number."""
    fields = _fields(pid)
    if not fields or fields[0] in "ZX" or int(fields[19]) != birth:
        return GONE
    return STOPPED if fields[0] in "Tt" else RUNNING


def group_and_birth(pid: int) -> tuple[int, int] | None:
    """The process group of a process and when it started; None if there is no such process."""
    fields = _fields(pid)
    return (int(fields[2]), int(fields[19])) if fields else None


def parent(pid: int) -> int:
    """The parent's number; 0 if there is no such process."""
    fields = _fields(pid)
    return int(fields[1]) if fields else 0


def numbers() -> list[int]:
    """Of all processes that can be seen."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children(pid: int) -> list[int]:
    """The living children of a process."""
    return [one for one in numbers() if parent(one) == pid and born(one)]


def words(pid: int) -> list[str]:
    """The command line of a process; an empty word if there is none."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return [os.fsdecode(word) for word in file.read().split(b"\0")]
    except OSError:
        return [""]


def variable(pid: int, name: str) -> str:
    """A variable of the environment that the process was started with; "" if there is none."""
    start = f"{name}=".encode()
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return ""
    return next((os.fsdecode(word[len(start) :]) for word in words if word.startswith(start)), "")


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal, which would end it otherwise."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt"))
    except (OSError, StopIteration):
        return False
    return bool(caught >> (number - 1) & 1)


def send(pid: int, birth: int, number: int) -> None:
    """Send a signal, unless the process is gone."""
    if state(pid, birth) != GONE:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def end(processes: list[tuple[int, int]], seconds: float) -> None:
    """End processes, by number and birth: SIGTERM, and SIGKILL so many seconds later."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid, birth in processes:
            send(pid, birth, number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(state(*one) != GONE for one in processes):
            time.sleep(0.02)


def write_stderr(pid: int, text: str, seconds: float, frames: Sequence[bytes] = ()) -> bool:
    """Write to where the standard error of another process goes; whether that worked in time.

    Opened only now: whoever holds the launcher's pipe keeps the launcher waiting for its end.

    Args:
        pid: the process.
        text: what is written last.
        seconds: for the launcher to read.
        frames: of events, see `_chainermn_events`.
    """
    path = f"/proc/{pid}/fd/2"
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            return False
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK
        file = os.open(path, flags)
    except OSError:
        return False
    deadline = time.monotonic() + seconds
    try:
        write_frames(file, frames, seconds / 2)
        return write(file, text, deadline - time.monotonic())
    except OSError:
        return False
    finally:
        os.close(file)


def write(file: int, text: str, seconds: float) -> bool:
    """Write all of the text unless nobody reads it for so long."""
    data = text.encode(errors="backslashreplace")
    deadline = time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while data and time.monotonic() < deadline:
            if select.select([], [file], [], 0.1)[1]:
                data = data[os.write(file, data[: select.PIPE_BUF]) :]
    return not data


def _fields(pid: int) -> list[str]:
    """The fields of `/proc/PID/stat` from the state on."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
