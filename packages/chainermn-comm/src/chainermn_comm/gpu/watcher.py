"""Watches what was enqueued on a device: a call returns before its work is over, or has failed.

A thread looks at CUDA's events and NCCL's asynchronous errors. After one a process is of no use: it
ends the job, or, where the user refused that, aborts NCCL's communicators.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpi4py import MPI

from .. import devices
from ..errors import CommunicationError, describe_exception, now
from ..messaging import ProcessGroup
from ..runtime import wait_until
from .nccl import NcclCommunicator, abort_all

# Between two looks of the thread while work is under way. Short beside a step of training; work
# that is over keeps its memory until the next look.
LOOK_SECONDS = 5e-3
# How long a process that ends, or a block that an exception left, waits for the device to finish.
DRAIN_SECONDS = 5.0

# What a device may still use, since it failed or didn't finish in time.
_orphaned: list[Any] = []
_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()  # that have a thread
_all: weakref.WeakSet[Watcher] = weakref.WeakSet()


class Watcher:
    """Watches one device's work for one set of ranks; after the first failure nothing works."""

    def __init__(self, group: ProcessGroup, device: int, used: Any, operation: str) -> None:
        """Watch this rank's work on ``device``, by which things are ``used`` (not collective)."""
        self._group, self._device, self._used = group, device, used
        self._operation = operation
        self.told = f"rank {group.rank}: {operation}"
        self.nccls: Sequence[NcclCommunicator] = ()
        self.failure = ""
        self._pending: deque[tuple[Any, Any]] = deque()  # events, and what lives until they happen
        self._free: list[Any] = []  # events
        self._lock = threading.RLock()
        self._wake, self._stop = threading.Event(), threading.Event()
        # Another thread must not call MPI otherwise, and the job may have to end; each call then
        # waits for its end.
        self.has_thread = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        self._thread: threading.Thread | None = None
        _all.add(self)
        self._in_call = False  # and may wait for other ranks in a call of NCCL's

    def start_call(self) -> None:
        """Look from now on, in the background, until :meth:`end_call`."""
        self._in_call = True
        if self.has_thread:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="chainermn-gpu-watcher", daemon=True
                )
                self._thread.start()
                _watchers.add(self)
            self._wake.set()

    def end_call(self, stream: Any, keep: Any) -> Any:
        """Do as :meth:`add` when all has been enqueued; the thread looks until that is over."""
        event = self.add(stream, keep)
        self._in_call = False
        return event

    def add(self, stream: Any, keep: Any) -> Any:
        """Keep something until the stream's work so far is over; return the event of its end."""
        with self._lock:
            event = self._free.pop() if self._free else devices.new_event()
            event.record(stream)
            self._pending.append((event, keep))
        return event

    def look(self) -> None:
        """Raise if something has failed; let go of what is over."""
        with self._lock:
            if self.failure:
                raise CommunicationError(
                    f"{self.told} failed: {self.failure}; make a new communicator on all ranks"
                )
            count = 0
            for event, _ in self._pending:
                if not devices.is_done(event):
                    break
                count += 1
            for nccl in self.nccls:
                nccl.check()  # work that failed may count as done
            for _ in range(count):
                self._free.append(self._pending.popleft()[0])

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Return once ``is_done`` returns True; raise if something fails before."""

        def is_over() -> bool:
            if is_done():
                return True
            self.look()
            return False

        wait_until(is_over)
        for nccl in self.nccls:
            nccl.check()

    @contextlib.contextmanager
    def ending(self, keep: Any = ()) -> Iterator[None]:
        """Raise CUDA's and NCCL's errors as CommunicationError; what is raised ends the job."""
        since = now()
        try:
            with devices.translated_errors(self.told):
                yield
        except BaseException as error:
            self.fail(error, since, keep)
            self.stop()  # if its thread has failed, the job is about to end
            raise

    def fail(self, error: BaseException, since: int, keep: Any = ()) -> None:
        """End the job by the exception that is being handled, unless the user refused that.

        Then abort NCCL, and let go of nothing that the device may still use. Only the first error
        since that time, which :func:`now` returned, counts.
        """
        with self._lock:
            is_first, self.failure = not self.failure, self.failure or describe_exception(error)
            _orphaned.append((self._used, keep, *self._pending))
            self._pending.clear()
        if is_first:
            self._group.interrupt(self._operation, error, since)
            abort_all(self.nccls)

    def abandon(self, streams: Sequence[Any]) -> bool:
        """Abort NCCL; return whether the streams are done within some seconds (not collective)."""
        self.stop()
        # All of this rank's, as each waits for what is on the streams, which may be another's.
        others = [each for each in _all if each._group.comm == self._group.comm]
        abort_all([nccl for watcher in others for nccl in watcher.nccls])
        end, is_done = time.monotonic() + DRAIN_SECONDS, False
        try:
            events = [event for event, _ in self._pending]
            for stream in streams:
                events.append(devices.new_event())
                events[-1].record(stream)
            wait_until(lambda: all(map(devices.is_done, events)) or time.monotonic() > end)
            is_done = time.monotonic() <= end
        finally:
            if not is_done:
                _orphaned.append((self._used, *self._pending))
            self._pending.clear()
        return is_done

    def finish(self) -> None:
        """Wait until all work is over; the thread ends (not collective)."""
        self.wait(lambda: not self._pending)
        self.stop()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        since = now()
        try:
            with devices.translated_errors(self.told), devices.use(self._device):
                # Whether it is to stop is asked after `clear`, which may undo what `stop` set.
                while not (self.failure or self._stop.is_set()):
                    self._wake.wait()
                    if self._stop.wait(LOOK_SECONDS):
                        return
                    self.look()
                    with self._lock:
                        if not (self._pending or self._in_call):
                            self._wake.clear()
        except Exception as error:
            if self.failure:  # the call that failed raises it
                return
            self.fail(error, since)
            print(f"ChainerMN: {error}", file=sys.stderr)  # as the job may not be ended

    def at_exit(self) -> None:
        """Let the work of a communicator that nobody finalized end; MPI is about to."""
        end = time.monotonic() + DRAIN_SECONDS
        while self._pending and not self.failure and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)  # the thread looks
        self.stop()


@atexit.register
def stop_all() -> None:
    """End the threads of communicators that nobody finalized."""
    for watcher in list(_watchers):
        watcher.at_exit()
