"""A thread that writes copies of arrays, while the arrays themselves go on changing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

_ALIGNMENT = 64  # bytes; every dtype may begin there


class BackgroundWriter:
    """One thread and one buffer, which is kept: fresh memory takes longer to fill.

    The thread calls no MPI, and the interpreter waits for it before it ends.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="chainermn-checkpoint")
        self._buffer = np.empty(0, np.uint8)

    def start(
        self, write: Callable[[dict[str, np.ndarray]], Any], arrays: Mapping[str, np.ndarray]
    ) -> Future[Any]:
        """Copy ``arrays`` and have ``write`` called with the copies.

        The copies lie in the buffer, so what was started before must have ended.

        Returns:
            What ``write`` will return. An exception in copying is one of the result, as if
            writing had failed.
        """
        try:
            return self._threads.submit(write, self._copy(arrays))
        except Exception as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        """Wait for the thread and free the buffer."""
        self._threads.shutdown()
        self._buffer = np.empty(0, np.uint8)

    def _copy(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
        if sum(sizes) > self._buffer.size:
            self._buffer = np.empty(0, np.uint8)  # freed first: both may not fit
            self._buffer = np.empty(sum(sizes), np.uint8)
        copies: dict[str, np.ndarray] = {}
        start = 0
        for (name, array), size in zip(arrays.items(), sizes, strict=True):
            if array.nbytes == 0:
                copies[name] = array
                continue
            copies[name] = np.ndarray(array.shape, array.dtype, self._buffer, start)
            np.copyto(copies[name], array)
            start += size
        return copies
