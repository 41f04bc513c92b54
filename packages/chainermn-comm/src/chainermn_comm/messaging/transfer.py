"""Moves the buffers of messages whose frames all receivers know already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from mpi4py import MPI

from .messages import Message

# MPI counts in C ints, and not every MPI has the large-count calls: 1 GiB is well below 2^31.
PIECE_BYTES = 1 << 30


def pieces(buffers: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The buffers (1-D uint8) cut into pieces that MPI can count; empty ones are left out."""
    for buffer in buffers:
        for start in range(0, buffer.size, PIECE_BYTES):
            yield buffer[start : start + PIECE_BYTES]


def bcast(comm: MPI.Intracomm, message: Message, root: int) -> None:
    """Fill the message on all ranks from root's (collective)."""
    for piece in pieces(message.buffers):
        comm.Bcast([piece, MPI.BYTE], root)


def transfer(
    comm: MPI.Intracomm,
    outgoing: Mapping[int, Message],
    incoming: Mapping[int, Message],
    tag: int,
) -> None:
    """Send and fill messages, by the rank they go to or come from, none of them one's own."""
    requests = [
        comm.Irecv([piece, MPI.BYTE], source, tag)
        for source, message in incoming.items()
        for piece in pieces(message.buffers)
    ]
    requests += [
        comm.Isend([piece, MPI.BYTE], dest, tag)
        for dest, message in outgoing.items()
        for piece in pieces(message.buffers)
    ]
    MPI.Request.Waitall(requests)
