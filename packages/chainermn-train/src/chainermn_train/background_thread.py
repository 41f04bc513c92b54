"""A function that runs in a thread beside the training, which waits for its end."""

from __future__ import annotations

import atexit
import sys
import threading
import warnings
from collections.abc import Callable

# How long an ending process waits for a thread. All ranks have begun the thread's work,
# so the work ends, unless a rank is gone.
EXIT_TIMEOUT_SECONDS = 20.0
# With Python's own switch interval of 5 ms, a thread waits so long each time it needs the
# interpreter while another thread computes in Python: about ten times for a message of
# 2 MB.
SWITCH_INTERVAL_SECONDS = 0.5e-3
_NAME = "ChainerMN"


class BackgroundThread:
    """A function that runs in a daemon thread; or in :meth:`wait`, if no thread was started.

    The function gets an event, which is set when somebody waits for the function's end.
    """

    def __init__(self, work: Callable[[threading.Event], None]) -> None:
        self._work: Callable[[threading.Event], None] | None = work
        self._error: BaseException | None = None
        self._wait_requested = threading.Event()
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)

    def start(self) -> None:
        """Start the thread; from then on this process switches between threads more often.

        If this MPI lets only one thread communicate, do the work at once. RuntimeError is
        raised if no thread can be started: ``wait`` does the work then.
        """
        if not threads_may_use_mpi():
            self.wait()
            return
        seconds = min(sys.getswitchinterval(), SWITCH_INTERVAL_SECONDS)
        sys.setswitchinterval(seconds)
        self._thread.start()

    def _run(self) -> None:
        work = self._work
        self._work = None
        try:
            if work is not None:
                work(self._wait_requested)
        except BaseException as error:
            self._error = error
        finally:
            # Both may hold much memory, and the error's traceback holds this frame.
            del self, work

    def wait(self) -> BaseException | None:
        """Wait for the end; return the exception that ended the work, if any."""
        self._wait_requested.set()
        if self._thread.ident is None:
            self._run()
        else:
            self._thread.join()
        return self._error


def raise_if_any(error: BaseException | None) -> None:
    """Raise what :meth:`BackgroundThread.wait` returned, unless it is None."""
    try:
        if error is not None:
            raise error
    finally:
        # Otherwise a cycle through its traceback would keep the gradients' memory.
        del error


def threads_may_use_mpi() -> bool:
    """Return whether two threads may communicate at the same time; warn if not."""
    MPI = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if MPI is None or MPI.Query_thread() >= MPI.THREAD_MULTIPLE:
        return True
    warnings.warn(
        "this MPI was not started with MPI_THREAD_MULTIPLE: nothing is computed while gradients "
        "travel",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


@atexit.register
def _wait_for_all() -> None:
    # MPI is finalized after this function, and no thread may communicate then.
    for thread in threading.enumerate():
        if thread.name == _NAME:
            thread.join(EXIT_TIMEOUT_SECONDS)
