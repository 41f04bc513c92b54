"""Exchanges of buffers whose sizes all ranks know, without blocking; also broadcasts.

Blocking sends of messages are in point_to_point.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

# MPI counts in C ints, and not every MPI has the large-count calls.
MAX_MESSAGE_BYTES = 64 << 20

# A contiguous 1-D array that MPI takes.
Buffer: TypeAlias = Any


def split_large(buffer: Buffer) -> Iterator[Buffer]:
    """Yield the buffer as uint8 arrays whose size MPI can count; nothing if it is empty."""
    octets = buffer.view(np.uint8)
    for start in range(0, octets.size, MAX_MESSAGE_BYTES):
        yield octets[start : start + MAX_MESSAGE_BYTES]


def start_exchange(
    comm: MPI.Intracomm,
    outgoing: Iterable[tuple[int, Buffer]],
    incoming: Iterable[tuple[int, Buffer]],
    tag: int,
) -> list[MPI.Request]:
    """Start to receive and to send buffers; return the requests, for which the caller waits.

    Each buffer comes with its other rank; buffers of this rank itself are skipped.
    Between two ranks, buffers arrive in the order in which they are sent, so both ranks
    must list them in the same order, with the same sizes.
    """
    requests = []
    for start, buffers in (comm.Irecv, incoming), (comm.Isend, outgoing):
        for other, buffer in buffers:
            if other != comm.rank:
                pieces = split_large(buffer)
                requests += [start([each, MPI.BYTE], other, tag) for each in pieces]
    return requests


def bcast_buffer(comm: MPI.Intracomm, buffer: Buffer, root: int) -> None:
    """Overwrite the buffer on all ranks by root's, by MPI's own broadcast (collective)."""
    for piece in split_large(buffer):
        comm.Bcast([piece, MPI.BYTE], root)
