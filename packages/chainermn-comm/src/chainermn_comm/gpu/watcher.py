"""Watches what was enqueued on a device: a call returns before its work is over, or has failed.

A thread looks at CUDA's events, NCCL's asynchronous errors and other ranks' failures. After a
failure it aborts NCCL's communicators, so that no rank's stream waits for ever; the next call
reports it.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpi4py import MPI

from .. import devices
from ..errors import CommunicationError, describe_exception
from ..runtime import wait_until
from .error_notifier import ErrorNotifier
from .nccl import NcclCommunicator, abort_all

# Between two looks of the thread while work is under way. Short beside a step of training; work
# that is over keeps its memory until the next look.
LOOK_SECONDS = 5e-3
# How long a rank that failed, or a process that ends, waits for its device to finish.
DRAIN_SECONDS = 5.0

# What a device may still use, since it didn't finish in time.
_orphaned: list[Any] = []
_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()


class Watcher:
    """Watches one device's work for one set of ranks; after the first failure nothing works."""

    def __init__(self, comm: MPI.Intracomm, device: int) -> None:
        """Watch the work of this rank on ``device`` (collective over ``comm``)."""
        self._notifier = ErrorNotifier(comm)
        self._device, self._rank = device, comm.rank
        self.nccls: Sequence[NcclCommunicator] = ()
        self.failure = ""
        self._told = False  # this rank's user has got the failure
        self._pending: deque[tuple[Any, Any]] = deque()  # events, and what lives until they happen
        self._free: list[Any] = []  # events
        self._lock = threading.RLock()
        self._wake, self._stop = threading.Event(), threading.Event()
        # Another thread must not call MPI otherwise; each call then waits for its end.
        self.in_background = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        self._thread: threading.Thread | None = None
        self._in_call = False  # and may wait for other ranks in a call of NCCL's

    def start_call(self) -> None:
        """Look from now on, in the background, until :meth:`end_call`."""
        self._in_call = True
        if self.in_background:
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
        """Raise if something has failed, here or on another rank; let go of what is over."""
        with self._lock:
            if self.failure:  # the other thread has got the message
                raise CommunicationError(self.failure)
            count = 0
            for event, _ in self._pending:
                if not devices.is_done(event):
                    break
                count += 1
            self._notifier.poll()
            self._check_nccl()
            for _ in range(count):
                self._free.append(self._pending.popleft()[0])

    def _check_nccl(self) -> None:
        for nccl in self.nccls:
            nccl.check()  # work that failed may count as done

    def check(self) -> None:
        """Raise CommunicationError if something has failed since the last call."""
        if not self.failure:
            try:
                self.look()
            except Exception as error:
                self.fail(error)
        if self.failure:
            self._told = True
            raise CommunicationError(
                f"rank {self._rank}: averaging gradients on GPUs failed in an earlier call: "
                f"{self.failure}; make a new communicator on all ranks"
            )

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Return once ``is_done`` returns True; raise if something fails before."""

        def is_over() -> bool:
            if is_done():
                return True
            self.look()
            return False

        wait_until(is_over)
        self._check_nccl()

    def fail(self, error: BaseException) -> None:
        """Send this rank's failure to the other ranks, and abort NCCL; only the first counts."""
        with self._lock:
            if self.failure:
                return
            self.failure = describe_exception(error)
        self._notifier.send(self.failure)
        abort_all(self.nccls)

    def tell(self, error: BaseException) -> CommunicationError:
        """Return what to raise in the call that failed by this error."""
        self.fail(error)
        self._told = True
        if isinstance(error, CommunicationError) and describe_exception(error) == self.failure:
            return error
        return CommunicationError(
            f"rank {self._rank}: averaging gradients on GPUs failed: {self.failure}"
        )

    def drain(self, streams: Iterable[Any], keep: Any) -> None:
        """After a failure, wait until streams are done: the memory that they use is to be freed.

        That lasts some seconds at most; what may still be in use then is never freed.
        """
        end, is_over = time.monotonic() + DRAIN_SECONDS, False
        # A device that failed itself raises again, and does nothing any more.
        with contextlib.suppress(Exception), devices.use(self._device):
            events = [event for event, _ in self._pending]
            for stream in streams:
                events.append(devices.new_event())
                events[-1].record(stream)
            for event in events:
                wait_until(lambda e=event: devices.is_done(e) or time.monotonic() > end)  # type: ignore[misc]
            is_over = time.monotonic() <= end
        if not is_over:
            _orphaned.append((keep, *self._pending))
        self._pending.clear()

    def finish(self) -> None:
        """Wait until all work is over, or something fails; the thread ends (not collective)."""
        try:
            if not self.failure:
                self.wait(lambda: not self._pending)
        except Exception as error:
            self.fail(error)
        self.stop()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def close(self) -> bool:
        """Release what the ranks share (collective); return whether any of them has failed."""
        told = self._notifier.close()
        if told and not self.failure:  # another rank failed when this one had finished
            self.failure = told
        return bool(told)

    def raise_untold(self) -> None:
        """Raise CommunicationError if something failed after the call that it belongs to."""
        if self.failure and not self._told:
            self.check()

    def _run(self) -> None:
        try:
            with devices.use(self._device):
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
            self.fail(error)

    def at_exit(self) -> None:
        """Let the work of a communicator that nobody finalized end; MPI is about to."""
        end = time.monotonic() + DRAIN_SECONDS
        while self._pending and not self.failure and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)  # the thread looks
        self.stop()
        if self.failure and not self._told:  # no call is left that could raise it
            print(
                f"ChainerMN: rank {self._rank}: averaging gradients on GPUs failed in the last "
                f"call: {self.failure}; what was computed since is wrong",
                file=sys.stderr,
            )


@atexit.register
def stop_all() -> None:
    """End the threads of communicators that nobody finalized, and print what no call raised."""
    for watcher in list(_watchers):
        watcher.at_exit()
