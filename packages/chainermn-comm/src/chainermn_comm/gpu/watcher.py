"""Watches what was enqueued on a device: a call returns before its work is over, or has failed.

The process has one thread for that, which polls CUDA's events and NCCL's asynchronous
errors. After one a process is of no use: it ends the job, or, where the user refused
that, aborts NCCL's communicators, and the one that uses them is of no use any more.
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
from itertools import takewhile
from typing import Any

from mpi4py import MPI

from .. import devices
from ..errors import CommunicationError, describe_exception
from ..messaging import ProcessGroup
from ..runtime import wait_until
from .nccl import NcclCommunicator, abort_all

# Between two polls of the thread while work is under way. Short beside a step of
# training; work that is over keeps its memory until the next poll.
POLL_SECONDS = 5e-3
# How long a process that ends, or a block that an exception left, waits for the device
# to finish.
DRAIN_SECONDS = 5.0

# What a device may still use, since it failed or didn't finish in time.
_orphaned: list[Any] = []
# But for those that were closed.
_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
_busy: set[Watcher] = set()  # with work that isn't over, which the thread polls
_lock = threading.RLock()  # of all that watchers change
_wake, _stop = threading.Event(), threading.Event()
_thread: threading.Thread | None = None  # once there was work


class Watcher:
    """Watches one device's work for one set of ranks; after the first failure nothing works."""

    def __init__(
        self,
        group: ProcessGroup,
        operation: str,
        nccls: Sequence[NcclCommunicator],
        used: Any,
    ) -> None:
        """Watch work on the current device, by which things are ``used`` (not collective)."""
        self._group, self._operation, self._nccls, self._used = (
            group,
            operation,
            nccls,
            used,
        )
        self.device = devices.current_device()
        self._what = f"rank {group.rank}: {operation}"
        self._failure = ""
        # Events, and what lives until they happen.
        self._pending: deque[tuple[Any, Any]] = deque()
        self._in_call = False  # and may wait for other ranks in a call of NCCL's
        with _lock:
            _watchers.add(self)

    @contextlib.contextmanager
    def enqueuing(self, keep: Any, stream: Any = None) -> Iterator[Any]:
        """Let the current stream wait for what is enqueued inside on a stream, which this gives.

        That is the current one by default. ``keep`` lives until the work is over. The
        thread polls until then; without a thread this waits for it.
        """
        with self.ending(keep):
            has_thread = _start_thread()
            with _lock:
                self._in_call = True
                _busy.add(self)
            _wake.set()
            if stream is None:
                stream = devices.current_stream()
            yield stream
            over = devices.recorded_event(stream)
            with _lock:
                self._pending.append((over, keep))
                self._in_call = False
            if not has_thread:
                wait_until(self._poll)
            elif stream.ptr != (current := devices.current_stream()).ptr:
                current.wait_event(over)

    def check(self) -> None:
        """Raise if something has failed, which ends the job; let go of what is over."""
        with self.ending():
            self._poll()

    def _poll(self) -> bool:
        """Raise if something has failed; let go of what is over, and return whether all is."""
        with _lock:
            if self._failure:
                raise CommunicationError(
                    f"{self._what} failed: {self._failure}; make a new communicator on all ranks"
                )
            over = list(takewhile(lambda each: devices.is_done(each[0]), self._pending))
            for nccl in self._nccls:
                nccl.check()  # work that failed may count as done
            for _ in over:
                self._pending.popleft()
            if not (self._pending or self._in_call):
                _busy.discard(self)
            return not self._pending

    @contextlib.contextmanager
    def ending(self, keep: Any = ()) -> Iterator[None]:
        """Use the device; what is raised, CUDA's and NCCL's as CommunicationError, ends the job.

        Where the user refused that, NCCL is aborted after the first error; what the
        device may still use, ``keep`` too, is never let go.
        """
        try:
            with devices.translated_errors(self._what), devices.use(self.device):
                yield
        except BaseException as error:
            with _lock:
                is_first = not self._failure
                self._failure = self._failure or describe_exception(error)
                _orphaned.append((self._used, keep, *self._pending))
                self._pending.clear()
                self._leave()
            if is_first:
                self._group.interrupt(self._operation, error)
                abort_all(self._nccls)
                if threading.current_thread() is _thread:
                    print(f"ChainerMN: {error}", file=sys.stderr)
            raise

    def abandon(self, streams: Sequence[Any] = ()) -> bool:
        """Abort NCCL; return whether all work, on streams too, is over within some seconds."""
        self._leave()
        # All of this rank's, as each waits for what is on the streams, which may be
        # another's.
        mine = [
            each for each in [self, *_watchers] if each._group.comm == self._group.comm
        ]
        abort_all([nccl for watcher in mine for nccl in watcher._nccls])
        end, is_done = time.monotonic() + DRAIN_SECONDS, False
        try:
            with contextlib.suppress(Exception), devices.use(self.device):
                for stream in streams:
                    self._pending.append((devices.recorded_event(stream), None))
                events = [event for event, _ in self._pending]
                wait_until(
                    lambda: all(map(devices.is_done, events)) or time.monotonic() > end
                )
                is_done = time.monotonic() <= end
        finally:
            if not is_done:
                _orphaned.append((self._used, *self._pending))
            self._pending.clear()
        return is_done

    def finish(self, close: Callable[[], None]) -> None:
        """Wait until all work is over, and ``close`` what it used."""
        with self.ending():
            wait_until(self._poll)
            self._leave()
            close()

    def _leave(self) -> None:
        with _lock:
            _watchers.discard(self)
            _busy.discard(self)


def _start_thread() -> bool:
    """Start the thread, if there is none yet; return whether there can be one.

    Another thread must not call MPI otherwise, and the job may have to end; each call
    then waits for its end.
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
        _poll_all()


def _poll_all() -> None:
    with _lock:
        busy = list(_busy)
    for watcher in busy:
        with contextlib.suppress(Exception), watcher.ending():
            watcher._poll()
    if _busy:
        _wake.set()


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
