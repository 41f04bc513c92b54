"""Ways in which a thread waits for messages: it takes a whole core, or leaves the core to others.

MPI's blocking calls poll without pause. That is fastest, but a thread that communicates
while other threads compute should only look for messages now and then.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing it starts MPI
    from mpi4py import MPI

# In this time a link of 1 Gbit/s brings 250 KB, which the sockets' buffers hold.
POLL_INTERVAL = 2e-3  # seconds
# Each test of the requests moves what MPI finds, up to some amount; this number keeps a
# link of 1 Gbit/s busy, see docs/decisions/updates.md.
TESTS_PER_POLL = 12

_thread = threading.local()


@contextlib.contextmanager
def patient_waits(urgent: threading.Event) -> Iterator[None]:
    """Let this thread's means of gradients leave the core to other threads while they wait.

    This context manager is for a thread that communicates in the background, on a
    communicator of :func:`~chainermn_comm.create_communicator`. Other calls, each call's
    handshake, and communicators of other classes wait as usual. Entering the block is
    not collective: some ranks may be inside and others not. It raises no errors.

    Args:
        urgent: once this event is set, because another thread waits for this one, waits
            are as fast as usual.
    """
    before = getattr(_thread, "urgent", None)
    _thread.urgent = urgent
    try:
        yield
    finally:
        _thread.urgent = before


def wait_all(requests: Sequence[MPI.Request]) -> None:
    """Wait until all requests are done."""
    if not requests:
        return
    of_mpi = requests[0]  # importing the class would start MPI
    urgent = getattr(_thread, "urgent", None)
    if urgent is not None:
        while not any(of_mpi.Testall(requests) for _ in range(TESTS_PER_POLL)):
            if urgent.wait(POLL_INTERVAL):
                break
    of_mpi.Waitall(requests)


def wait_until(is_done: Callable[[], bool]) -> None:
    """Call ``is_done`` until it returns True; leave the core to others between two calls."""
    urgent = getattr(_thread, "urgent", None)
    while not is_done():
        if urgent is None or urgent.wait(POLL_INTERVAL):
            os.sched_yield()


def barrier(comm: MPI.Intracomm) -> None:
    """Wait for all ranks (collective); some of them may be patient and others not."""
    # MPI can't match an Ibarrier with a Barrier. An Ibarrier with a wait takes as long.
    wait_all([comm.Ibarrier()])
