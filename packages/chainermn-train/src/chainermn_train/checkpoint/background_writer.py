"""A thread that writes copies of arrays, while these go on changing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np


class BackgroundWriter:
    """One thread, which calls no MPI, and the copies that it writes."""

    def __init__(self) -> None:
        # The interpreter waits for the thread before it ends.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="chainermn-checkpoint")
        # Kept: fresh memory takes longer to fill.
        self._copies: dict[str, np.ndarray] = {}

    def start(
        self,
        write: Callable[[dict[str, np.ndarray]], None],
        arrays: Mapping[str, np.ndarray],
    ) -> Future[None]:
        """Copy arrays and have ``write`` called with the copies; return its future end.

        What was started before must have ended. An exception in copying is the
        future's.
        """
        try:
            old, self._copies = self._copies, {}
            for name, array in arrays.items():
                copy = old.pop(name, None)
                if copy is None or (copy.shape, copy.dtype) != (
                    array.shape,
                    array.dtype,
                ):
                    copy = np.empty(array.shape, array.dtype)
                np.copyto(copy, array)
                self._copies[name] = copy
            return self._threads.submit(write, self._copies)
        except Exception as error:
            failed: Future[None] = Future()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        """Wait for the thread and free the copies."""
        self._threads.shutdown()
        self._copies.clear()
