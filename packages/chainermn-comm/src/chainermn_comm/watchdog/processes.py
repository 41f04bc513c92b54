"""Facts about processes, from `/proc`; signals to them; writing to their standard error.

A process is identified by its number and its start time, since numbers are used again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence

from _chainermn_events import write_frames

RUNNING, STOPPED, GONE = "running", "stopped", "gone"
Process = tuple[int, int]  # number and start time


def start_time(pid: int) -> int:
    """Return when the process started, in the kernel's ticks; 0 when it is gone."""
    fields = _fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0


def state(process: Process) -> str:
    """Return RUNNING, STOPPED or GONE."""
    fields = _fields(process[0])
    if not fields or fields[0] in "ZX" or int(fields[19]) != process[1]:
        return GONE
    return STOPPED if fields[0] in "Tt" else RUNNING


def group_and_start(pid: int) -> tuple[int, int] | None:
    """Return a process's group and start time; None if there is no such process."""
    fields = _fields(pid)
    return (int(fields[2]), int(fields[19])) if fields else None


def parent(pid: int) -> int:
    """Return the parent's number; 0 if there is no such process."""
    fields = _fields(pid)
    return int(fields[1]) if fields else 0


def pids() -> list[int]:
    """Return the numbers of all processes that can be seen."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(roots: set[int]) -> set[int]:
    """Return these processes and all that descend from them."""
    parents = {pid: parent(pid) for pid in pids()}
    found = set(roots)
    while more := {pid for pid, ppid in parents.items() if ppid in found} - found:
        found |= more
    return found


def command_line(pid: int) -> list[str]:
    """Return the command line of a process; an empty word if there is none."""
    return [os.fsdecode(word) for word in _read(f"/proc/{pid}/cmdline").split(b"\0")]


def env_variable(pid: int, name: str) -> str:
    """Return a variable of the environment that the process was started with; "" for none."""
    start = f"{name}=".encode()
    words = _read(f"/proc/{pid}/environ").split(b"\0")
    return next((os.fsdecode(word[len(start) :]) for word in words if word.startswith(start)), "")


def catches(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal, which would end it otherwise."""
    lines = _read(f"/proc/{pid}/status").splitlines()
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith(b"SigCgt")), 0)
    return bool(caught >> (number - 1) & 1)


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
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and any(state(one) != GONE for one in processes):
            time.sleep(0.02)


def write_stderr(pid: int, text: str, seconds: float, frames: Sequence[bytes] = ()) -> bool:
    """Write frames of events and a text to where the standard error of another process goes.

    It is opened only now: who holds the launcher's pipe keeps the launcher waiting for its end.

    Returns:
        Whether the launcher has read enough in ``seconds`` for all of it to be written.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK
    try:
        file = os.open(f"/proc/{pid}/fd/2", flags)
    except OSError:  # such as that it is a socket
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
    """Write all of the text unless nobody reads it for so long; return whether that worked."""
    data = text.encode(errors="backslashreplace")
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(file, select.POLLOUT)
    with contextlib.suppress(OSError):
        while data and time.monotonic() < deadline:
            if poll.poll(100):
                data = data[os.write(file, data[: select.PIPE_BUF]) :]
    return not data


def _fields(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the state on; none if the process is gone."""
    return _read(f"/proc/{pid}/stat").decode(errors="replace").rpartition(")")[2].split()


def _read(path: str) -> bytes:
    """Return a file's contents; nothing if it can't be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
