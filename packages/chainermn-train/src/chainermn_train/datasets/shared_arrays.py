"""NumPy arrays that processes of one machine share, those of a data set in one file without a name.

They are pickled as a handle of the file, so that worker processes map the same memory.
A process that writes gets its own copy of the pages it writes to, so that none changes
another's.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import secrets
import socket
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

MEMORY_FOLDER = "/dev/shm"
# MPI keeps its own buffers in that folder without reserving them, so that filling it to
# the last byte kills ranks later, by SIGBUS. Room for the buffers of some ranks stays
# free.
LEFT_FREE_BYTES = 32 << 20
# A file begins with its token, which differs where a descriptor is another file by now,
# or on another machine. The bytes after it, and the arrays there, begin at cache lines.
_TOKEN_BYTES = 32
_BEGIN = _LINE_BYTES = 64

# Python names it from 3.13 on. Pages that are never written to need no memory set
# aside.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

# Bytes are put into one file, whichever thread pickles them first.
_sharing = threading.Lock()


class SharedFile:
    """A file whose whole length is reserved and mapped; it lives as long as this.

    What a process writes to the mapping is its own: neither the file nor another
    mapping has it. A copy, deep or by pickling, maps the file anew.
    """

    def __init__(self, descriptor: int, token: bytes) -> None:
        self.descriptor = descriptor
        self._token = token
        close = weakref.finalize(self, os.close, descriptor)
        # Arrays may outlive it until then, and the kernel closes it.
        close.atexit = False
        nbytes = os.fstat(descriptor).st_size
        # An array in it keeps the memory mapped.
        self.map = mmap.mmap(descriptor, nbytes, mmap.MAP_PRIVATE | _MAP_NORESERVE)

    @classmethod
    def reserve(cls, nbytes: int) -> SharedFile:
        """Make a file for ``nbytes`` bytes after the token, in memory or else on disk."""
        failures = []
        for folder in dict.fromkeys((MEMORY_FOLDER, tempfile.gettempdir())):
            try:
                return cls._reserve_in(folder, nbytes)
            except OSError as error:
                failures.append(f"{folder}: {error.strerror or error}")
        raise OSError(
            errno.ENOSPC,
            f"no place for {nbytes} bytes of examples ({'; '.join(failures)}); free some space "
            "there, or set TMPDIR to a folder that has it",
        )

    @classmethod
    def _reserve_in(cls, folder: str, nbytes: int) -> SharedFile:
        token = secrets.token_bytes(_TOKEN_BYTES)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            # Otherwise a page that can't be had is a SIGBUS when it is touched.
            os.posix_fallocate(file.fileno(), 0, _BEGIN + nbytes)
            free = os.statvfs(folder)
            if (
                folder == MEMORY_FOLDER
                and free.f_bavail * free.f_frsize < LEFT_FREE_BYTES
            ):
                raise OSError(errno.ENOSPC, "MPI needs the space that is left")
            os.pwrite(file.fileno(), token, 0)
            return cls(os.dup(file.fileno()), token)

    def fill(self, blocks: Iterable[np.ndarray]) -> None:
        """Write uint8 arrays, 1-D, one after another."""
        offset = _BEGIN
        for block in blocks:
            end = offset + len(block)
            while offset < end:
                offset += os.pwrite(self.descriptor, block[offset - end :].data, offset)

    def __reduce__(self) -> Any:
        # As a file of this process: the one that made it may have ended.
        return _open_file, (
            socket.gethostname(),
            os.getpid(),
            self.descriptor,
            self._token,
        )


class SharedBytes:
    """The bytes of a data set's arrays.

    They lie in a shared file, or in this process's own memory until they are first
    pickled or copied. A pickle holds only the file's handle: the same user's processes
    on this machine can load it, while this process has the data set. If this process
    has written to the bytes since, they are put into another file first.
    """

    def __init__(self, array: np.ndarray, file: SharedFile | None = None) -> None:
        """Have a uint8 array, 1-D, to which nothing else refers, or which a file maps."""
        self.array = array
        self._file = file

    @classmethod
    def load(cls, file: SharedFile | None, nbytes: int) -> SharedBytes:
        """Map the bytes in a file; there are none if there is no file."""
        if file is None:
            return cls(np.empty(0, np.uint8))
        return cls(np.ndarray(nbytes, np.uint8, file.map, _BEGIN), file)

    @classmethod
    def filled(cls, nbytes: int, blocks: Iterable[np.ndarray]) -> SharedBytes:
        """Make a new file of the bytes in uint8 arrays, 1-D."""
        file = SharedFile.reserve(nbytes) if nbytes else None
        if file is not None:
            file.fill(blocks)
        return cls.load(file, nbytes)

    def __reduce__(self) -> Any:
        with _sharing:
            own = self.array
            if own.size and (self._file is None or _differ(own, self._file)):
                vars(self).update(vars(self.filled(own.size, [own])))
        return self.load, (self._file, own.size)


class SharedArray:
    """A data set: the rows of a NumPy array without objects, which lies in shared bytes."""

    def __init__(
        self, place: SharedBytes, begin: int, shape: tuple[int, ...], dtype: np.dtype
    ) -> None:
        """Begin at a byte; the bytes need not be there yet."""
        self._place = place
        self._begin = begin
        self._shape = shape
        self._dtype = dtype

    @property
    def array(self) -> np.ndarray:
        """The array where it lies now."""
        return np.ndarray(self._shape, self._dtype, self._place.array, self._begin)

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
        return np.array(self.array, dtype) if copy else np.asarray(self.array, dtype)


def _differ(own: np.ndarray, file: SharedFile) -> bool:
    """Return whether this process has written to its pages of the bytes in a file."""
    with open(file.descriptor, "rb", closefd=False) as opened:
        return not np.array_equal(
            own, np.memmap(opened, np.uint8, "r", _BEGIN, own.shape)
        )


def _open_file(host: str, process: int, descriptor: int, token: bytes) -> SharedFile:
    """Load a pickle of a shared file, or copy one."""
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        # Opening anything else may have effects.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FileNotFoundError(errno.ENOENT, "that number is no file now", path)
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if os.pread(opened, _TOKEN_BYTES, 0) != token:
            os.close(opened)
            raise FileNotFoundError(
                errno.ENOENT, "that number is another file now", path
            )
        return SharedFile(opened, token)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the examples lie in memory of process {process} on {host} and can't be reached from "
            f"process {os.getpid()} on {socket.gethostname()} ({error.strerror}): a data set that "
            "scatter_dataset made is pickled as a reference to that memory; load it on the same "
            "machine, by the same user, while that process has the data set",
        ) from error
