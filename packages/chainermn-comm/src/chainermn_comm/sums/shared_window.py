"""Memory that all ranks of a node map, and the barrier between writing and reading."""

from __future__ import annotations

import os
import secrets

import numpy as np
from mpi4py import MPI

from .. import runtime
from ..layout import CACHE_LINE

# Windows lie here on MPICH and on Open MPI. The first access to a page that can't be
# allocated ends the process by SIGBUS, so there must be room for the whole window
# before. The reserve is for MPI's own files.
FOLDER = "/dev/shm"
RESERVE_BYTES = 8 << 20

NOT_ALLOCATED = "shared memory could not be allocated on some node"
NO_ROOM = (
    f"no room for shared memory in {FOLDER} on some node (docker run --shm-size=1g)"
)
NOT_SHARED = "the memory that MPI calls shared is not, on some node"


class NoSharedMemory(Exception):
    """A window can't be made. The text is the same on all ranks, and gives the reason."""


class SharedWindow:
    """One buffer for each rank of a node, which all ranks of the node can read and write.

    Other ranks can read numbers after the :meth:`barrier` that follows the writing. Views of
    the buffers must not outlive the window.
    """

    def __init__(self, comm: MPI.Intracomm, sizes: list[int]) -> None:
        """Allocate ``sizes[i]`` bytes for rank i of the node (collective); ``comm`` isn't freed."""
        self._comm = comm
        nbytes = sizes[comm.rank] + CACHE_LINE
        self._window = MPI.Win.Allocate_shared(nbytes, 1, comm=comm)
        # One passive epoch for the window's life: MPICH wants Sync inside an epoch.
        self._window.Lock_all()
        # MPICH's memory begins 16 bytes after a cache line. Sums of arrays that
        # cross lines take half as long again.
        self.buffers = []
        for rank, size in enumerate(sizes):
            memory = np.asarray(self._window.Shared_query(rank)[0])
            start = -memory.ctypes.data % CACHE_LINE
            self.buffers.append(memory[start : start + size])
        # Pages are allocated when they are first written: here, while there is room for
        # them.
        self.buffers[comm.rank][...] = 0

    @classmethod
    def open(
        cls, comm: MPI.Intracomm, node: MPI.Intracomm, sizes: list[int]
    ) -> SharedWindow:
        """Open a window on each node, and check that it works (collective over ``comm``).

        If some node can have no window, all ranks raise NoSharedMemory.
        """
        _raise_on_all(comm, obstacle(sum(sizes)))
        reason = ""
        try:
            window = cls(node, sizes)
        except (MPI.Exception, MemoryError) as error:
            last = str(error).strip().splitlines()[-1:]
            reason = ": ".join([NOT_ALLOCATED, *last])
        # If a rank has no window, the others keep theirs: only all ranks can free a window.
        _raise_on_all(comm, reason)
        if not window.is_shared():
            reason = NOT_SHARED
        _raise_on_all(comm, reason)
        return window

    def barrier(self) -> None:
        """Wait for the node's ranks; then each of them sees the writes of all."""
        # The barrier orders processes, not memory (MPI 3.1, example 11.7): hence both
        # syncs.
        self.sync()
        runtime.barrier(self._comm)
        self.sync()

    def sync(self) -> None:
        """Order this rank's reads and writes before a barrier, or after one."""
        self._window.Sync()

    def is_shared(self) -> bool:
        """Return whether all ranks read what rank 0 writes (collective)."""
        nonce = self._comm.bcast(secrets.token_bytes(16))
        start = self.buffers[0][: len(nonce)]
        if self._comm.rank == 0:
            start[...] = np.frombuffer(nonce, np.uint8)
        self.barrier()
        seen = start.tobytes() == nonce
        self.barrier()
        return all(self._comm.allgather(seen))

    def close(self) -> None:
        """Free the window (collective); its buffers are gone."""
        self.buffers = []
        self._window.Unlock_all()
        self._window.Free()


def _raise_on_all(comm: MPI.Intracomm, reason: str) -> None:
    """Raise NoSharedMemory on all ranks if one of them has a reason (collective)."""
    reason = max(comm.allgather(reason))
    if reason:
        raise NoSharedMemory(reason)


def obstacle(nbytes: int) -> str:
    """Return why this rank can't make a window of that size; an empty text if it can."""
    try:
        found = os.statvfs(FOLDER)
    except OSError as error:
        return f"{NOT_ALLOCATED}: {FOLDER}: {error.strerror}"
    if found.f_bavail * found.f_frsize < nbytes + RESERVE_BYTES:
        return NO_ROOM
    return ""
