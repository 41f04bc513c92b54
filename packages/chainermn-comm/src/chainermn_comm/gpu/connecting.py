"""Makes an NCCL communicator with a time-out, so that a rank that fails doesn't hang the others.

NCCL's own call blocks until all ranks have come, whatever happens to them, and CuPy has no other.
So a thread calls it, while the rank listens for other ranks' failures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from .. import devices
from ..errors import CommunicationError, SharedFailure, describe_exception
from ..messaging import Handshake
from ..timeout import timeout_from_env
from .error_notifier import ErrorNotifier

# Some seconds are usual on large jobs. CHAINERMN_TIMEOUT overrides it where that is shorter.
CONNECT_SECONDS = 60.0
LISTEN_SECONDS = 5e-3  # between two looks for other ranks' failures
OPERATION = "making an NCCL communicator"


class _Attempt:
    """One call in a thread of its own; what it makes after it was abandoned is aborted."""

    def __init__(self, make: Callable[[], Any], device: int) -> None:
        self._make, self._device = make, device
        self._lock = threading.Lock()
        self._abandoned = False
        self._error: BaseException | None = None
        self._made: Any = None
        self.over = threading.Event()
        threading.Thread(target=self._run, name="chainermn-nccl-init", daemon=True).start()

    def _run(self) -> None:
        try:
            with devices.use(self._device):  # a new thread begins at device 0
                made = self._make()
                with self._lock:
                    self._made = made
                    if self._abandoned:
                        made.abort()
        except BaseException as error:
            self._error = error
        self.over.set()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._made

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            if self._made is not None:
                self._made.abort()


def connect(comm: MPI.Intracomm, make: Callable[[], Any]) -> Any:
    """Return what ``make`` returns, once it has returned on all ranks (collective).

    ``make`` blocks until all ranks of ``comm`` call it, and is called in a thread.
    CommunicationError is raised on all ranks where it fails on one, or takes too long; the thread
    may then be blocked for ever.
    """
    handshake, device, timeout = Handshake(comm), devices.current_device(), timeout_from_env()
    seconds = min(CONNECT_SECONDS, timeout.seconds if timeout.ends_job else CONNECT_SECONDS)
    notifier, attempt = ErrorNotifier(comm), _Attempt(make, device)
    try:
        with SharedFailure(handshake, OPERATION):
            try:
                _wait(attempt, notifier, seconds)
                made = attempt.result()
            except BaseException as error:
                notifier.send(describe_exception(error))
                if isinstance(error, CommunicationError) or not isinstance(error, Exception):
                    raise
                raise CommunicationError(
                    f"rank {comm.rank}: {OPERATION} failed: {describe_exception(error)}"
                ) from error
        handshake(OPERATION)
    except BaseException:
        attempt.abandon()
        raise
    finally:
        notifier.close()
    return made


def _wait(attempt: _Attempt, notifier: ErrorNotifier, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not attempt.over.wait(LISTEN_SECONDS):
        notifier.poll()
        if time.monotonic() > end:
            raise CommunicationError(
                f"rank {notifier.rank}: NCCL has not connected the ranks within {seconds:g} s; see "
                "what it says with NCCL_DEBUG=INFO, and check NCCL_SOCKET_IFNAME"
            )
