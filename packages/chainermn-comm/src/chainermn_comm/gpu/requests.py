"""Buffers that the ranks of a communicator exchange, polled as an event on a device is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

# MPI may read and write the memory of messages that nobody waits for any more, so it must stay.
_left: list[list[MPI.Request]] = []


class Messages:
    """Messages under way; polling them, a rank hears of a failed peer meanwhile."""

    def __init__(self, requests: list[MPI.Request]) -> None:
        self._requests = requests

    @property
    def done(self) -> bool:
        return bool(MPI.Request.Testall(self._requests))


def trade(
    comm: MPI.Intracomm,
    outgoing: Sequence[Any],
    incoming: Sequence[Any],
    wait: Callable[[Any], None],
) -> None:
    """Send each rank a buffer and receive one from it (collective).

    Args:
        comm: carries nothing else.
        outgoing: by rank; arrays that MPI takes, 1-D and contiguous. Not sent are this rank's own
            and empty ones.
        incoming: likewise, of the sizes that the others send.
        wait: returns when what it is given is ``done``, or raises if that will never be.
    """
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    requests = [_post(comm.Irecv, incoming[rank], rank) for rank in others]
    requests += [_post(comm.Isend, outgoing[rank], rank) for rank in others]
    under_way = [request for request in requests if request is not None]
    try:
        wait(Messages(under_way))
    except BaseException:
        _left.append(under_way)
        raise


def _post(call: Callable[..., MPI.Request], buffer: Any, rank: int) -> MPI.Request | None:
    return call([buffer.view(np.uint8), MPI.BYTE], rank) if buffer.size else None
