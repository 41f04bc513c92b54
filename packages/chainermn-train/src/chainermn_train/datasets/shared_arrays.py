"""NumPy arrays that processes of one machine share: those of a data set lie in one nameless file.

They are pickled as a handle of the file, so that worker processes map the same memory.
A process that writes gets its own copy of the pages it writes to, so that none changes
another's.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import socket
import tempfile
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

MEMORY_FOLDER = "/dev/shm"
# MPI keeps its own buffers in that folder without reserving them, so that filling it to
# the last byte kills ranks later, by SIGBUS. Room for the buffers of some ranks stays
# free.
LEFT_FREE_BYTES = 32 << 20
_LINE_BYTES = 64  # arrays begin at cache lines
_COMPARED_BYTES = 1 << 20

# Python names this flag from 3.13 on. Pages that are never written to need no memory
# set aside.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class SharedFile:
    """A nameless file that is mapped here; what this process writes to ``map`` stays its own.

    A pickle or a copy maps the same file: the same user's processes on this machine can
    load it, while this process has the data set. If this process has written to the
    mapping, the bytes are put into another file first.
    """

    def __init__(self, descriptor: int) -> None:
        """Own an open file, which isn't empty."""
        self.descriptor = descriptor
        # An array in it keeps the memory mapped.
        self.map = mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE | _MAP_NORESERVE)
        weakref.finalize(self.map, os.close, descriptor)

    def __reduce__(self) -> Any:
        if self._is_written_to():
            content = np.frombuffer(self.map, np.uint8)
            vars(self).update(vars(make_shared_file(content.size, [content])))
        # As a file of this process: the process that made the file may have ended.
        identity = _identity(os.fstat(self.descriptor))
        return _open_file, (
            socket.gethostname(),
            os.getpid(),
            self.descriptor,
            identity,
        )

    def _is_written_to(self) -> bool:
        """Return whether this process has changed pages of its mapping."""
        with mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ) as unchanged:
            for begin in range(0, len(unchanged), _COMPARED_BYTES):
                compared = slice(begin, begin + _COMPARED_BYTES)
                if self.map[compared] != unchanged[compared]:
                    return True
        return False


def make_shared_file(nbytes: int, blocks: Iterable[np.ndarray]) -> SharedFile:
    """Return a new file of so many bytes, at least one, which 1-D uint8 arrays give in order."""
    file = SharedFile(_reserve(nbytes))
    with open(file.descriptor, "wb", closefd=False) as opened:
        for block in blocks:
            opened.write(block.data)
    return file


class SharedArray:
    """A data set: the rows of a NumPy array without objects, which lies in a shared file.

    Whoever makes it sets ``file`` before its rows are used, unless it has no bytes.
    """

    file: SharedFile | None = None

    def __init__(self, begin: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Begin at a byte of the file."""
        self._begin = begin
        self._shape = shape
        self._dtype = dtype

    @property
    def array(self) -> np.ndarray:
        """The array where it lies now."""
        if self.file is None:
            return self.within(None)
        return self.within(self.file.map)

    def within(self, content: Any) -> np.ndarray:
        """Return the array in a buffer of the whole file's bytes."""
        return np.ndarray(self._shape, self._dtype, content, self._begin)

    @property
    def end(self) -> int:
        """The byte where another array may begin."""
        lines = -(-math.prod(self._shape) * self._dtype.itemsize // _LINE_BYTES)
        return self._begin + lines * _LINE_BYTES

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy:
            return np.array(self.array, dtype)
        return np.asarray(self.array, dtype)


def _reserve(nbytes: int) -> int:
    """Return the descriptor of a nameless file of that length, in memory or else on disk."""
    failures = []
    for folder in dict.fromkeys((MEMORY_FOLDER, tempfile.gettempdir())):
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                # Otherwise a page that can't be had is a SIGBUS when it is touched.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                free = os.statvfs(folder)
                left = free.f_bavail * free.f_frsize
                if folder != MEMORY_FOLDER or left >= LEFT_FREE_BYTES:
                    return os.dup(file.fileno())
            failures.append(f"{folder}: MPI needs the space that is left")
        except OSError as error:
            failures.append(f"{folder}: {error.strerror or error}")
    raise OSError(
        errno.ENOSPC,
        f"no place for {nbytes} bytes of examples ({'; '.join(failures)}); free some space "
        "there, or set TMPDIR to a folder that has it",
    )


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    """Return what tells a file from any other that has had its number."""
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _open_file(
    host: str, process: int, descriptor: int, identity: tuple[int, int, int]
) -> SharedFile:
    """Load a pickle of a shared file, or copy one."""
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        # Opening anything else may have effects.
        if _identity(os.stat(path)) == identity:
            return SharedFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        reason = "that number is another file now"
    except OSError as error:
        reason = str(error.strerror)
    raise OSError(
        errno.ENOENT,
        f"the examples lie in memory of process {process} on {host} and can't be reached from "
        f"process {os.getpid()} on {socket.gethostname()} ({reason}): a data set that "
        "scatter_dataset made is pickled as a reference to that memory; load it on the same "
        "machine, by the same user, while that process has the data set",
    )
