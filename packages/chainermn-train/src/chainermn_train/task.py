"""Runs a function in a thread beside the training, which sooner or later waits for it."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable

# How long a process that ends waits for what still runs. The ranks have all begun it, so it ends,
# unless one of them is gone.
EXIT_SECONDS = 20.0
# Python's own 5 ms are what a thread waits whenever it wants the interpreter while another one
# computes in Python: a message of 2 MB and what belongs to it want it about ten times.
SWITCH_SECONDS = 0.5e-3

_running: weakref.WeakSet[Task] = weakref.WeakSet()
_lock = threading.Lock()
_usual_interval: list[float] = []


class Task:
    """A function under way in a daemon thread."""

    def __init__(self, work: Callable[[threading.Event], None], threaded: bool = True) -> None:
        """Begin ``work``, which gets an event that is set once somebody waits for it.

        Args:
            work: what to do.
            threaded: False does it here and now instead.
        """
        self._work: Callable[[threading.Event], None] | None = work
        self._error: BaseException | None = None
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ChainerMN", daemon=True)
        _enter(self)
        if threaded:
            self._thread.start()
        else:
            self._hurry.set()
            self._run()

    def _run(self) -> None:
        try:
            assert self._work is not None
            self._work(self._hurry)
        except BaseException as error:
            self._error = error
        finally:
            self._work = None  # it may keep much memory
            _leave(self)

    def wait(self, seconds: float | None = None) -> BaseException | None:
        """Wait for the end, for so long at most; the exception that ended it, if one did."""
        self._hurry.set()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return self._error


def _enter(task: Task) -> None:
    with _lock:
        if not len(_running):
            _usual_interval[:] = [sys.getswitchinterval()]
            sys.setswitchinterval(min(SWITCH_SECONDS, *_usual_interval))
        _running.add(task)


def _leave(task: Task) -> None:
    with _lock:
        _running.discard(task)
        if not len(_running):
            sys.setswitchinterval(_usual_interval[0])


@atexit.register
def _wait_for_all() -> None:
    # MPI ends after this, which must not happen while a thread is in it.
    for task in list(_running):
        task.wait(EXIT_SECONDS)
