"""A thread that writes a copy of a shard, while its arrays go on changing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from .shards import Shard


class BackgroundWriter:
    """One thread, which calls no MPI, and the copy that it writes."""

    def __init__(self) -> None:
        # The interpreter waits for the thread before it ends.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="chainermn-checkpoint")
        self._copy = Shard()  # kept: fresh memory takes longer to fill

    def start(self, write: Callable[[Shard], None], shard: Shard) -> Future[None]:
        """Copy a shard and have ``write`` called with the copy; return its future end.

        What was started before must have ended. An exception in copying is the future's.
        """
        try:
            self._copy = shard.copy(into=self._copy)
            return self._threads.submit(write, self._copy)
        except Exception as error:
            failed: Future[None] = Future()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        """Wait for the thread and free the copy."""
        self._threads.shutdown()
        self._copy = Shard()
