"""Watches enqueued work on devices, which may fail after the call has returned.

One thread per process polls CUDA's events and NCCL's asynchronous errors. A process is of
no use after such a failure, so the thread ends the job. If the user has refused this,
the thread aborts NCCL's communicators, and the communicator that uses them can't be used
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
from functools import cache
from typing import Any, NamedTuple

from mpi4py import MPI

from ..errors import CommunicationError
from ..gpu import NcclCommunicator, devices, nccl
from ..messaging import ProcessGroup
from ..runtime import wait_until

# Seconds between two polls of the thread, fewer than a step of training takes. Work
# that is over keeps its memory until the next poll.
POLL_SECONDS = 5e-3
# How long a process waits for its device when it ends.
DRAIN_SECONDS = 5.0

# Watchers that are in use, and failed ones: the device may still use their arrays.
_watchers: set[Watcher] = set()


class Enqueued(NamedTuple):
    """The work of one call."""

    over: Any  # the event after the work; None if enqueuing failed
    used: Any  # memory that must live until the work is over


class Watcher:
    """Watches the current device's work for one group of ranks, and owns its NCCL communicators.

    Attributes:
        device: the number of the device.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """Watch nothing yet (not collective)."""
        self.device = devices.current_device()
        self._nccls: list[NcclCommunicator] = []
        self._group = group
        self._operation = ""  # of the last call
        self._enqueued: deque[Enqueued] = deque()
        self._last: Any = None  # the event after all work so far
        # A call is being enqueued, which may wait for NCCL between nodes.
        self._in_call = False
        # Held while NCCL is polled or aborted, but not in calls of NCCL's, which may wait
        # for other ranks.
        self._lock = threading.RLock()
        _watchers.add(self)

    def own(self, *communicators: Any) -> None:
        """Watch NCCL's communicators among these, and close them at the end (not collective)."""
        found = [each for each in communicators if isinstance(each, NcclCommunicator)]
        self._nccls.extend(found)

    @property
    def is_busy(self) -> bool:
        """Whether work may be under way that has not failed."""
        has_work = self._in_call or bool(self._enqueued)
        return has_work and not self._group.handshake.interruptions

    @contextlib.contextmanager
    def using_device(self, operation: str) -> Iterator[None]:
        """Use the device in preparation of a call; raise CommunicationError after a failure."""
        self._raise_failure()
        self._operation = operation
        with devices.use(self.device):
            yield

    @contextlib.contextmanager
    def enqueuing(self, operation: str, used: Any) -> Iterator[None]:
        """Enqueue a call's work on the current stream, after the work of earlier calls.

        ``used`` lives until the work has ended. An error inside is a failure of the work,
        because it can't be raised on the other ranks. Without a thread, the call waits
        for the end of the work.
        """
        has_thread = _start_thread()
        self._raise_failure()
        self._operation = operation
        self._in_call = True
        with self._ending(used), devices.use(self.device):
            if self._last is not None:
                devices.current_stream().wait_event(self._last)
            yield
            self._last = devices.recorded_event()
            self._enqueued.append(Enqueued(self._last, used))
        self._in_call = False
        if not has_thread:
            self.wait()

    def wait(self) -> None:
        """Wait until all work is over; raise CommunicationError after a failure."""
        wait_until(self.poll)

    def poll(self) -> bool:
        """Drop work that is over, and return whether all is; raise the error of a failure."""
        with self._lock:
            self._raise_failure()
            with self._ending():
                while self._enqueued and devices.is_done(self._enqueued[0].over):
                    self._enqueued.popleft()
                for each in self._nccls:
                    each.check()  # work that failed may count as done
            return not self._enqueued

    def close(self) -> None:
        """Wait until all work is over, and release NCCL."""
        self.wait()
        _watchers.discard(self)
        with devices.use(self.device):
            for each in self._nccls:
                each.close()

    def abandon(self) -> None:
        """Abort NCCL, and let the thread drop the work when it has ended; raises nothing."""
        with self._lock:
            nccl.abort_all(self._nccls)
            self._nccls.clear()

    def _raise_failure(self) -> None:
        interruptions = self._group.handshake.interruptions
        if interruptions:
            raise CommunicationError(
                f"rank {self._group.rank}: {interruptions[0]}; make a new communicator on "
                "all ranks"
            )

    @contextlib.contextmanager
    def _ending(self, used: Any = None) -> Iterator[None]:
        """End the job after an error inside; if the user refused aborts, abort NCCL alone."""
        try:
            with devices.translated_errors(
                f"rank {self._group.rank}: {self._operation}"
            ):
                yield
        except BaseException as error:
            self._enqueued.append(Enqueued(None, used))  # for ever
            self._group.interrupt(self._operation, error)
            self.abandon()
            raise


@cache
def _start_thread() -> bool:
    """Start the thread, if there is none yet; return whether a thread is possible.

    If MPI admits no second thread, no thread could end the job, so each call waits for
    the end of its work.
    """
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return False
    threading.Thread(target=_run, name="chainermn-gpu-watcher", daemon=True).start()
    return True


def _run() -> None:
    while True:
        time.sleep(POLL_SECONDS)
        for watcher in _busy():
            try:
                watcher.poll()
            except Exception as error:  # a thread's traceback would go unnoticed
                print(f"ChainerMN: {error}", file=sys.stderr)


def _busy() -> list[Watcher]:
    return [watcher for watcher in list(_watchers) if watcher.is_busy]


@atexit.register
def _drain() -> None:
    """Let the work of communicators that nobody has finalized end, because MPI is about to end."""
    end = time.monotonic() + DRAIN_SECONDS
    while _busy() and time.monotonic() < end:
        time.sleep(POLL_SECONDS)  # the thread polls
