"""Memory that all ranks of a node map, and the meetings that make it safe to use."""

from __future__ import annotations

import os
import secrets

import numpy as np
from mpi4py import MPI

from .waiting import barrier

# Windows lie here on MPICH and on Open MPI. A page that can't be had is SIGBUS at its first
# touch, not an exception, so there must be room for all of it before. The reserve is for
# what MPI itself puts there.
FOLDER = "/dev/shm"
RESERVE_BYTES = 8 << 20


class SharedWindow:
    """One buffer for each rank of a node, which all of them can read and write.

    What a rank writes before :meth:`meet` the others can read after it. Views of the buffers
    must not outlive the window.
    """

    def __init__(self, comm: MPI.Intracomm, sizes: list[int]) -> None:
        """Allocate (collective over the node).

        Args:
            comm: the ranks of one node; stays the caller's.
            sizes: bytes for each rank.
        """
        self._comm = comm
        self._window = MPI.Win.Allocate_shared(sizes[comm.rank], 1, comm=comm)
        # One passive epoch for the window's life: MPICH wants Sync inside an epoch.
        self._window.Lock_all()
        self.buffers = [np.asarray(self._window.Shared_query(rank)[0]) for rank in range(comm.size)]

    def meet(self) -> None:
        """Wait for the node's ranks; what each wrote before is then visible to all."""
        # The barrier orders processes, not memory (MPI 3.1, example 11.7): hence both syncs.
        self._window.Sync()
        barrier(self._comm)
        self._window.Sync()

    def is_shared(self) -> bool:
        """Whether what rank 0 writes here is what the others read (collective)."""
        nonce = self._comm.bcast(secrets.token_bytes(16) if self._comm.rank == 0 else None)
        start = self.buffers[0][: len(nonce)]
        if self._comm.rank == 0:
            start[...] = np.frombuffer(nonce, np.uint8)
        self.meet()
        seen = start.tobytes() == nonce
        self.meet()
        return self._comm.allreduce(seen, MPI.LAND)

    def close(self) -> None:
        """Free the window (collective); its buffers are gone."""
        self.buffers = []
        self._window.Unlock_all()
        self._window.Free()


def has_room(nbytes: int) -> bool:
    """Whether this node can hold a window of that size."""
    try:
        found = os.statvfs(FOLDER)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize >= nbytes + RESERVE_BYTES
