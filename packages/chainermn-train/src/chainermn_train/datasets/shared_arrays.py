"""NumPy arrays that processes of one machine share: a data set's arrays lie in a nameless file.

Their pickle refers to the file, so that worker processes map the same memory. A process
that writes gets its own copies of the pages that it writes to, so no process changes the
arrays of other processes.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..nameless_files import LINE_BYTES, FileReference, reserve

# Python names this flag from 3.13 on. Pages that are never written to need no memory
# set aside.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class SharedBytes:
    """The bytes of a data set's arrays: in a nameless file, or in this process until then.

    A pickle or a copy maps the same file: the same user's processes on this machine can
    load it, while this process has the data set. If the bytes are in no file yet, or
    this process has written to its mapping, they are put into a new file first.

    Attributes:
        content: a buffer of the bytes, whose length is a multiple of LINE_BYTES. What
            this process writes to it stays its own.
    """

    content: Any = b""
    _descriptor: Any = None  # the descriptor of the file, if there is one

    def map(self, descriptor: int) -> None:
        """Map an open file that isn't empty, and own its descriptor from then on."""
        self._descriptor = descriptor
        # An array in the mapping keeps it.
        self.content = mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE | _MAP_NORESERVE)
        weakref.finalize(self.content, os.close, descriptor)

    def fill(self, nbytes: int, blocks: Iterable[np.ndarray]) -> None:
        """Write 1-D uint8 arrays, ``nbytes`` in all (at least 1), to a new file, and map it."""
        with open(reserve(nbytes, "examples"), "wb") as file:
            for block in blocks:
                file.write(block.data)
            file.flush()
            self.map(os.dup(file.fileno()))

    def __reduce__(self) -> Any:
        if not len(self.content):
            return SharedBytes, ()
        if self._descriptor is None or self._is_written_to():
            content = np.frombuffer(self.content, np.uint8)
            self.fill(content.size, [content])
        # Use a descriptor of this process, since the process that made the file may
        # have ended.
        return _open_file, (FileReference.of(self._descriptor),)

    def _is_written_to(self) -> bool:
        """Return whether this process has changed pages of its mapping."""
        path = f"/proc/self/fd/{self._descriptor}"
        unchanged = np.memmap(path, np.int64, "r")
        return not np.array_equal(np.frombuffer(self.content, np.int64), unchanged)


@dataclass(eq=False, repr=False)
class SharedArray:
    """A data set: the rows of a NumPy array without objects, which lies in shared bytes."""

    _shared: SharedBytes
    _begin: int  # the byte where the array begins; the bytes need not be there yet
    _shape: tuple[int, ...]
    _dtype: np.dtype

    @property
    def array(self) -> np.ndarray:
        """The array, in the file or in this process."""
        return np.ndarray(self._shape, self._dtype, self._shared.content, self._begin)

    @property
    def end(self) -> int:
        """The byte where another array may begin."""
        lines = -(-math.prod(self._shape) * self._dtype.itemsize // LINE_BYTES)
        return self._begin + lines * LINE_BYTES

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype, copy=copy)


def _open_file(reference: FileReference) -> SharedBytes:
    """Load a pickle of shared bytes, or copy them."""
    try:
        shared = SharedBytes()
        shared.map(reference.open(os.O_RDONLY))
        return shared
    except OSError as error:
        raise OSError(
            errno.ENOENT,
            f"the examples lie in the file {reference.path} on {reference.host}, which can't be "
            f"opened here ({error.strerror}): a data set that scatter_dataset made is pickled as a "
            "reference to that memory of a process; load it on the same machine, by the same user, "
            "while that process has the data set",
        ) from error
