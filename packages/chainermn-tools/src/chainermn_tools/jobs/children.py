"""The programs that this process runs. It adopts each program's orphans, and ends them with it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import psutil  # type: ignore[import-untyped]

from chainermn_tools.jobs.signals import handle_signals

PR_SET_CHILD_SUBREAPER = 36
# Killing ends after this time, even if a process can't be killed.
KILL_SECONDS = 5.0
KILL_STEP_SECONDS = 0.01
# The time between two looks for orphans that have ended; a look takes milliseconds.
REAP_SECONDS = 5.0
# A part of the command line of a job's monitor.
MONITOR = "chainermn_comm.watchdog.monitor"

_lock = threading.RLock()  # a signal may interrupt the thread that holds the lock
_running: dict[int, subprocess.Popen[Any]] = {}
_closed = False


@contextlib.contextmanager
def running(args: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a program in the block, after which no process that it started is left here.

    The program runs in a session of its own, so that Ctrl-C reaches only this process.
    Raise OSError if the program can't be started: InterruptedError if no programs are
    started any more.
    """
    spared = _children()
    with _lock:
        if _closed:
            raise InterruptedError(errno.EINTR, "no program is started any more")
        _adopt_orphans(True)
        # Files are inherited as from a shell, because a rank finds its launcher through
        # such a file.
        process = subprocess.Popen(args, start_new_session=True, close_fds=False, **how)
        _running[process.pid] = process
    is_over = threading.Event()
    threading.Thread(target=_reap_orphans, args=(spared, is_over), daemon=True).start()
    with process:  # closes its pipes
        try:
            yield process
        finally:
            is_over.set()
            process.kill()
            try:
                process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                # The process waits for a disk, and nobody waits for the process.
                process.returncode = -signal.SIGKILL
            kill_orphans(spared)
            with _lock:
                del _running[process.pid]
                _adopt_orphans(len(_running) > 0)
    # The folder that a killed mpiexec of Open MPI leaves.
    folder = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"ompi.{process.pid}")
    shutil.rmtree(folder, ignore_errors=True)


def _adopt_orphans(do_so: bool) -> None:
    """Make this process, or init again, the parent of orphans among its descendants."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, do_so)


def kill_orphans(spared: Collection[int]) -> None:
    """Kill the processes that programs left to this process, and their descendants.

    Other children of this process are spared: those in its own session, those that a
    thread waits for, those that it had before, and monitors, which remove what a job has
    left in shared memory, and end.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        orphans = {pid for pid in _orphans(spared) if not _is_monitor(pid)}
        if not orphans:
            return
        for pid in orphans:
            # If another thread was first, there is no such process, or child.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(KILL_STEP_SECONDS)


def _reap_orphans(spared: Collection[int], is_over: threading.Event) -> None:
    """Take the exit status of orphans that end, until the event, so that no zombies stay."""
    while not is_over.wait(REAP_SECONDS):
        for pid in _orphans(spared):
            with contextlib.suppress(ChildProcessError):  # another thread was first
                os.waitpid(pid, os.WNOHANG)


def _orphans(spared: Collection[int]) -> set[int]:
    with _lock:  # a program that another thread is just starting is among `running`
        return _children(away=True).difference(spared, _running)


def _is_monitor(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return MONITOR in " ".join(psutil.Process(pid).cmdline())
    return False


def _children(away: bool = False) -> set[int]:
    """Return the children of this process, or only those in other sessions than its own."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(ProcessLookupError):
            if not away or os.getsid(child.pid) != os.getsid(0):
                found.add(child.pid)
    return found


@contextlib.contextmanager
def kill_children_on_exit() -> Iterator[None]:
    """Kill the programs that threads still run at the end of the block; then none can start.

    Threads that were left behind may run programs, for which nobody waits. In the
    block, signals that would end this process raise SystemExit (main thread only).
    """
    global _closed
    _closed = False
    spared = _children()

    def leave(number: int) -> None:
        # On the way out, pools wait for their threads, and these for their programs.
        _close(spared)
        sys.exit(128 + number)

    with handle_signals(leave):
        try:
            yield
        finally:
            _close(spared)


def _close(spared: Collection[int]) -> None:
    """Start no more programs, and kill the running ones with all their descendants."""
    global _closed
    with _lock:
        _closed = True
    for process in tuple(_running.values()):
        process.kill()
        # Only then are the program's children children of this process.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_SECONDS)
    kill_orphans(spared)
