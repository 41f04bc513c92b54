"""Measures how far this process's clock is from that of its communicator's rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .file import now

if TYPE_CHECKING:  # importing it starts MPI
    from mpi4py import MPI

# Round trips to rank 0, of which the shortest counts.
ROUND_TRIPS = 10


class Offset(NamedTuple):
    """What a rank has measured.

    Attributes:
        at: seconds of its own clock.
        ahead: seconds by which rank 0's clock is ahead of it.
        round_trip: seconds that the messages took; half of it is the error at most.
    """

    at: float
    ahead: float
    round_trip: float


def measure(comm: MPI.Intracomm, tag: int) -> Offset:
    """Compare this clock with rank 0's (collective).

    Args:
        comm: carries nothing else with this tag at the time.
        tag: of the messages.
    """
    theirs = np.zeros(1)
    if comm.rank == 0:
        for rank in range(1, comm.size):
            for _ in range(ROUND_TRIPS):
                comm.Recv(theirs, rank, tag)
                theirs[0] = now()
                comm.Send(theirs, rank, tag)
        return Offset(now(), 0.0, 0.0)
    found = []
    for _ in range(ROUND_TRIPS):
        sent = now()
        comm.Send(theirs, 0, tag)
        comm.Recv(theirs, 0, tag)
        received = now()
        middle = (sent + received) / 2
        found.append(Offset(middle, float(theirs[0]) - middle, received - sent))
    return min(found, key=lambda one: one.round_trip)
