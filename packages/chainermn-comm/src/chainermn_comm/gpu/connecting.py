"""Makes an NCCL communicator with a time-out, so that a rank that fails doesn't hang the others.

NCCL's own call blocks until all ranks have come, whatever happens to them, and CuPy has
no other. So a thread calls it, while the rank listens for other ranks' failures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
from mpi4py import MPI

from .. import devices
from ..environment import NCCL_VARIABLE, seconds
from ..errors import CommunicationError, describe_exception, raise_together
from ..messaging import Handshake
from ..watchdog import timeout_from_env

# By default; some seconds are usual on large jobs. CHAINERMN_TIMEOUT counts where it is
# shorter.
CONNECT_SECONDS = 60.0
LISTEN_SECONDS = 5e-3  # between two looks for other ranks' failures
OPERATION = "making an NCCL communicator"


def connect(comm: MPI.Intracomm, make: Callable[[], Any]) -> Any:
    """Return what ``make`` returns, once it has returned on all ranks (collective).

    ``make`` blocks until all ranks of ``comm`` call it, and is called in a thread.
    CommunicationError is raised on all ranks where it fails on one, or takes too long;
    the thread may then be blocked for ever. What it makes after all is aborted.
    """
    handshake, made = Handshake(comm), Future[Any]()
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    # Of each rank, once it has ended its attempt, whether that failed.
    own, failed = np.zeros(1, np.uint8), np.zeros(comm.size, np.uint8)
    traffic = comm.Dup()
    requests = [
        traffic.Irecv([failed[rank : rank + 1], MPI.BYTE], rank) for rank in others
    ]
    try:
        with raise_together(handshake, OPERATION):
            try:
                _start(make, made)
                limit = _limit()
                end = time.monotonic() + limit
                while not (failed.any() or wait([made], LISTEN_SECONDS).done):
                    if time.monotonic() > end:
                        raise CommunicationError(
                            f"rank {comm.rank}: NCCL has not connected the ranks within "
                            f"{limit:g} s; see what it says with NCCL_DEBUG=INFO, and check "
                            f"NCCL_SOCKET_IFNAME, or set {NCCL_VARIABLE}"
                        )
                    MPI.Request.Testsome(requests)
                if made.done():
                    made.result()
            except BaseException as error:
                own[0] = 1
                if isinstance(error, CommunicationError) or not isinstance(
                    error, Exception
                ):
                    raise
                raise CommunicationError(
                    f"rank {comm.rank}: {OPERATION} failed: {describe_exception(error)}"
                ) from error
            finally:
                requests += [traffic.Isend([own, MPI.BYTE], rank) for rank in others]
    except BaseException:
        made.add_done_callback(lambda made: made.exception() or made.result().abort())
        raise
    finally:
        MPI.Request.Waitall(requests)
        traffic.Free()
    return made.result()


def _start(make: Callable[[], Any], made: Future[Any]) -> None:
    """Call ``make`` on the current device in a thread that the process doesn't wait for."""
    device = devices.current_device()

    def run() -> None:
        try:
            with devices.use(device):  # a new thread begins at device 0
                made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="chainermn-nccl-init", daemon=True).start()


def _limit() -> float:
    timeout = timeout_from_env()
    own = seconds(NCCL_VARIABLE, CONNECT_SECONDS)
    return min(own, timeout.seconds) if timeout.ends_job else own
