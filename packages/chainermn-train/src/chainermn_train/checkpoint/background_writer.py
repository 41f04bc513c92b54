"""A thread that writes copies of arrays, while the arrays themselves go on changing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np


class BackgroundWriter:
    """One thread, which calls no MPI, and the copies that it writes."""

    def __init__(self) -> None:
        # The interpreter waits for the thread before it ends.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="chainermn-checkpoint")
        self._copies: dict[str, np.ndarray] = {}  # kept: fresh memory takes longer to fill

    def start(
        self, write: Callable[[dict[str, np.ndarray]], Any], arrays: Mapping[str, np.ndarray]
    ) -> Future[Any]:
        """Copy ``arrays`` and have ``write`` called with the copies; return its future result.

        What was started before must have ended. An exception in copying is the future's.
        """
        try:
            return self._threads.submit(write, self._copy(arrays))
        except Exception as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        """Wait for the thread and free the copies."""
        self._threads.shutdown()
        self._copies = {}

    def _copy(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        # Those that don't fit any more are freed first: there may be no room for both.
        specs = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        kept = self._copies.items()
        self._copies = {n: copy for n, copy in kept if specs.get(n) == (copy.shape, copy.dtype)}
        for name, array in arrays.items():
            if name not in self._copies:
                self._copies[name] = np.empty(array.shape, array.dtype)
            np.copyto(self._copies[name], array)
        return self._copies
