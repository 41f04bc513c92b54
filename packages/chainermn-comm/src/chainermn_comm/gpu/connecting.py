"""Makes an NCCL communicator with a time-out, so that a rank that fails doesn't hang the others.

NCCL's own call blocks until all ranks have come, whatever happens to them, and CuPy has no other.
So a thread calls it, while the rank listens for other ranks' failures.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from .. import devices
from ..errors import CommunicationError, SharedFailure, describe_exception
from ..messaging import Handshake
from ..timeout import timeout_from_env

# By default; some seconds are usual on large jobs. CHAINERMN_TIMEOUT counts where it is shorter.
CONNECT_SECONDS, VARIABLE = 60.0, "CHAINERMN_NCCL_TIMEOUT"
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
    handshake = Handshake(comm)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    # Of each rank, once it has ended its attempt, whether that failed.
    own, failed = np.zeros(1, np.uint8), np.zeros(comm.size, np.uint8)
    traffic = comm.Dup()
    told = [traffic.Irecv([failed[rank : rank + 1], MPI.BYTE], rank) for rank in others]
    attempt: _Attempt | None = None

    def another_has_failed() -> bool:
        MPI.Request.Testsome(told)
        return bool(failed.any())

    try:
        with SharedFailure(handshake, OPERATION):
            try:
                attempt = _Attempt(make, devices.current_device())
                if _wait(attempt, another_has_failed, comm.rank):
                    attempt.result()
            except BaseException as error:
                own[0] = 1
                if isinstance(error, CommunicationError) or not isinstance(error, Exception):
                    raise
                raise CommunicationError(
                    f"rank {comm.rank}: {OPERATION} failed: {describe_exception(error)}"
                ) from error
            finally:
                told += [traffic.Isend([own, MPI.BYTE], rank) for rank in others]
        handshake(OPERATION)
    except BaseException:
        if attempt is not None:
            attempt.abandon()
        raise
    finally:
        MPI.Request.Waitall(told)
        traffic.Free()
    return attempt.result()


def _seconds() -> float:
    text, timeout = os.environ.get(VARIABLE, "").strip(), timeout_from_env()
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text or CONNECT_SECONDS)) < math.inf:
            return min(seconds, timeout.seconds) if timeout.ends_job else seconds
    raise ValueError(f"{VARIABLE} must be seconds, more than 0, got {text!r}")


def _wait(attempt: _Attempt, another_has_failed: Callable[[], bool], rank: int) -> bool:
    """Return whether the attempt is over; it isn't where another rank's has failed."""
    seconds = _seconds()
    end = time.monotonic() + seconds
    while not attempt.over.wait(LISTEN_SECONDS):
        if another_has_failed():
            return False
        if time.monotonic() > end:
            raise CommunicationError(
                f"rank {rank}: NCCL has not connected the ranks within {seconds:g} s; see what it "
                f"says with NCCL_DEBUG=INFO, and check NCCL_SOCKET_IFNAME, or set {VARIABLE}"
            )
    return True
