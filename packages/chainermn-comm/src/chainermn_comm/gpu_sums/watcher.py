"""Watches what was enqueued on a device: a call returns before its work is over, or has failed.

The process has one thread for that, which polls CUDA's events and NCCL's asynchronous
errors. After a failure the process is of no use: it ends the job. Where the user refused
that, NCCL's communicators are aborted, and the communicator that uses them is of no use
any more.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from mpi4py import MPI

from ..errors import CommunicationError, describe_exception
from ..gpu import NcclCommunicator, devices, nccl
from ..messaging import ProcessGroup
from ..runtime import wait_until

# Between two polls of the thread while work is under way. Short beside a step of
# training; work that is over keeps its memory until the next poll.
POLL_SECONDS = 5e-3
# How long a process that ends, or a block that an exception left, waits for the device
# to finish.
DRAIN_SECONDS = 5.0

# What a device may still use, since it failed or didn't finish in time.
_orphaned: list[Any] = []
_busy: set[Watcher] = set()  # with work that isn't over, which the thread polls
_lock = threading.RLock()  # of all that watchers change
_wake = threading.Event()
_stop = threading.Event()
_thread: threading.Thread | None = None  # once there was work


class Enqueued(NamedTuple):
    """The work of one call."""

    over: Any  # the event after it
    used: Any  # what lives until then


class Watcher:
    """Watches the current device's work for one group of ranks, by all its NCCL communicators.

    Attributes:
        device: the number of the device.
        nccls: the communicators that are checked, and aborted after a failure.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """Watch nothing yet (not collective)."""
        self.device = devices.current_device()
        self.nccls: list[NcclCommunicator] = []
        self._group = group
        self._operation = ""  # of the last call
        self._failure = ""
        self._enqueued: deque[Enqueued] = deque()
        self._last: Any = None  # the event after all work so far
        # A call is being enqueued, which may wait for what NCCL never ends.
        self._in_call = False

    @contextlib.contextmanager
    def using_device(self, operation: str) -> Iterator[None]:
        """Use the device, after errors of earlier work have been raised; let go of what is over.

        CUDA's and NCCL's errors are raised as CommunicationError, whose text names the
        operation.
        """
        self._let_go()
        with devices.translated_errors(self._what(operation)), devices.use(self.device):
            yield

    @contextlib.contextmanager
    def enqueuing(self, operation: str, used: Any) -> Iterator[None]:
        """Enqueue a call's work on the current stream, after the work of earlier calls.

        What is ``used`` lives until the work is over. What is raised inside is a failure,
        as it can't be raised on the other ranks. Without a thread this waits for the end
        of the work.
        """
        has_thread = _start_thread()
        self._let_go()
        self._operation = operation
        with _lock:
            self._in_call = True
            _busy.add(self)
        _wake.set()
        with self._ending(used), devices.use(self.device):
            if self._last is not None:
                devices.current_stream().wait_event(self._last)
            yield
            self._last = devices.recorded_event()
            with _lock:
                self._enqueued.append(Enqueued(self._last, used))
                self._in_call = False
        if not has_thread:
            self.wait()

    def wait(self) -> None:
        """Wait until all work is over; raise what has failed."""
        wait_until(self._let_go)

    def abandon(self) -> None:
        """Abort NCCL, and wait some seconds for the end of all work; raises nothing."""
        with _lock:
            _busy.discard(self)
        nccl.abort_all(self.nccls)
        end = time.monotonic() + DRAIN_SECONDS
        with contextlib.suppress(Exception), devices.use(self.device):
            wait_until(lambda: self._is_over() or time.monotonic() > end)
        _orphaned.extend(self._enqueued)
        self._enqueued.clear()

    def _let_go(self) -> bool:
        """Drop what is over; return whether all work is, and raise what has failed."""
        with self._ending(), _lock:
            if self._failure:
                raise CommunicationError(
                    f"{self._failure}; make a new communicator on all ranks"
                )
            is_over = self._is_over()
            for each in self.nccls:
                each.check()  # work that failed may count as done
            if is_over and not self._in_call:
                _busy.discard(self)
            return is_over

    def _is_over(self) -> bool:
        while self._enqueued and devices.is_done(self._enqueued[0].over):
            self._enqueued.popleft()
        return not self._enqueued

    @contextlib.contextmanager
    def _ending(self, used: Any = None) -> Iterator[None]:
        """End the job where something is raised inside; if the user refused that, abort NCCL."""
        try:
            with devices.translated_errors(self._what(self._operation)):
                yield
        except BaseException as error:
            with _lock:
                is_first = not self._failure
                self._failure = self._failure or describe_exception(error)
                _orphaned.extend([used, *self._enqueued])
                self._enqueued.clear()
                _busy.discard(self)
            if is_first:
                self._group.interrupt(self._operation, error)
                nccl.abort_all(self.nccls)
            raise

    def _what(self, operation: str) -> str:
        return f"rank {self._group.rank}: {operation}"


def _start_thread() -> bool:
    """Start the thread, if there is none yet; return whether there can be one.

    Where MPI admits no other thread, none could end the job; each call then waits for
    the end of its work.
    """
    global _thread
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return False
    if _thread is None:
        _thread = threading.Thread(
            target=_run, name="chainermn-gpu-watcher", daemon=True
        )
        _thread.start()
    return True


def _run() -> None:
    while _wake.wait() and not _stop.wait(POLL_SECONDS):
        _wake.clear()  # first: what is enqueued from now on sets it again
        with _lock:
            busy = list(_busy)
        for watcher in busy:
            _poll(watcher)
        if _busy:
            _wake.set()


def _poll(watcher: Watcher) -> None:
    """Poll in the thread, whose exceptions nobody sees."""
    try:
        watcher._let_go()
    except Exception as error:
        print(f"ChainerMN: {error}", file=sys.stderr)


@atexit.register
def stop_all() -> None:
    """Let the work of communicators that nobody finalized end; MPI is about to."""
    global _thread
    if _thread is None:
        return
    end = time.monotonic() + DRAIN_SECONDS
    while _busy and time.monotonic() < end:
        time.sleep(POLL_SECONDS)  # the thread polls
    _stop.set()
    _wake.set()
    _thread.join(DRAIN_SECONDS)
    _thread = None
    _stop.clear()
