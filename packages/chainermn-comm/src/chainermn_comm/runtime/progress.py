"""How a thread waits for messages: at once and with all of a core, or leaving the core to others.

MPI's blocking calls poll without pause: fastest, but a thread that communicates while
others compute had better test for messages now and then.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing it starts MPI
    from mpi4py import MPI

# A link of 1 Gbit/s brings 250 KB meanwhile, which the sockets' buffers hold.
POLL_INTERVAL = 2e-3  # seconds
# Each test of the requests moves what MPI finds, up to some amount; this number keeps a
# link of 1 Gbit/s busy, see docs/decisions/updates.md.
TESTS_PER_POLL = 12

_thread = threading.local()


@contextlib.contextmanager
def patient_waits(urgent: threading.Event) -> Iterator[None]:
    """Within, this thread's collective calls leave the core to other threads while they wait.

    It is for a thread that communicates in the background, on a communicator made by
    :func:`~chainermn_comm.create_communicator` (of others' communicators nothing
    changes), and for calls that take the mean of gradients; other calls wait as always,
    and so does each call's handshake, for ranks that come late. Entering it is not
    collective: some ranks may be within and others not. It raises nothing of its own.

    Args:
        urgent: from when it is set, because somebody waits for this thread, its waits
            are as fast as ever.
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
    """Call ``is_done`` until it returns True; others get the core between two calls."""
    urgent = getattr(_thread, "urgent", None)
    while not is_done():
        if urgent is None or urgent.wait(POLL_INTERVAL):
            os.sched_yield()


def barrier(comm: MPI.Intracomm) -> None:
    """Wait for all ranks (collective); some of them may be patient and others not."""
    # MPI matches no Ibarrier with a Barrier. Waited for at once it takes as long.
    wait_all([comm.Ibarrier()])
