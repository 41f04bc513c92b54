"""Exchanges of buffers whose sizes all ranks know, without blocking; also broadcasts.

Blocking sends of messages are in point_to_point.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

# MPI counts in C ints, and not every MPI has the large-count calls. Of less memory than
# this, a received message could not even be discarded.
MAX_MESSAGE_BYTES = 64 << 20

# A contiguous 1-D array that MPI takes.
Buffer: TypeAlias = Any


def split_large(buffer: Buffer) -> Iterator[Buffer]:
    """Yield the buffer as uint8 in pieces that MPI can count; nothing of an empty one."""
    octets = buffer.view(np.uint8)
    for start in range(0, octets.size, MAX_MESSAGE_BYTES):
        yield octets[start : start + MAX_MESSAGE_BYTES]


def start_exchange(
    comm: MPI.Intracomm,
    outgoing: Iterable[tuple[int, Buffer]],
    incoming: Iterable[tuple[int, Buffer]],
    tag: int,
) -> list[MPI.Request]:
    """Start to receive and to send buffers; the requests are for the caller to wait for.

    Each comes with the other rank; those of this one stay where they are. Between two
    ranks, buffers arrive in the order in which they are sent, so both must list them in
    the same order, with the same sizes.
    """
    rank, requests = comm.rank, []
    for start, buffers in (comm.Irecv, incoming), (comm.Isend, outgoing):
        for other, buffer in buffers:
            if other != rank:
                requests += [
                    start([each, MPI.BYTE], other, tag) for each in split_large(buffer)
                ]
    return requests


def bcast_buffer(comm: MPI.Intracomm, buffer: Buffer, root: int) -> None:
    """Overwrite the buffer on all ranks by root's, as MPI does that (collective)."""
    for piece in split_large(buffer):
        comm.Bcast([piece, MPI.BYTE], root)


def bcast_in_parts(comm: MPI.Intracomm, buffer: Buffer, root: int, tag: int) -> None:
    """Overwrite the buffer, of one size on all ranks, by root's (collective).

    It is for ranks that copy from one another's memory. Root sends each a part, which
    that sends to the others: the scatter and collect of M. Barnett et al., "Building a
    High-Performance Collective Communication Library", 1994, by direct messages, the
    only ones with this ``tag``.
    """
    parts = list(enumerate(np.array_split(buffer, comm.size)))
    own = [(rank, parts[comm.rank][1]) for rank in range(comm.size) if rank != root]
    if comm.rank == root:
        MPI.Request.Waitall(start_exchange(comm, parts + own, [], tag))
    else:
        MPI.Request.Waitall(
            start_exchange(comm, [], [(root, parts[comm.rank][1])], tag)
        )
        MPI.Request.Waitall(start_exchange(comm, own, parts, tag))
