"""NumPy arrays that processes of one machine share, in files without a name.

Such an array is pickled as a handle of its file, so that worker processes map the same memory.
A process that writes gets its own copy of the pages it writes to, so that none changes another's.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import socket
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

MEMORY_FOLDER = "/dev/shm"
# MPI keeps its own buffers in that folder without reserving them, so that filling it to the
# last byte kills ranks later, by SIGBUS. Room for the buffers of some ranks stays free.
LEFT_FREE_BYTES = 32 << 20
# A file begins with its token; arrays after it begin at multiples of a cache line.
ALIGNMENT = 64
_TOKEN_BYTES = 32

# Python names it from 3.13 on. Pages that are never written to need no memory set aside.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

_sharing = threading.Lock()  # an array is put into one file, whichever thread pickles it first


class SharedMemoryHandle(NamedTuple):
    """How other processes open a file that this process has open under a descriptor."""

    host: str
    process: int
    descriptor: int
    token: bytes  # differs where the descriptor is another file by now, or on another machine

    def open(self) -> int:
        """Open the file anew; return the descriptor. OSError: this process can't reach it."""
        path = f"/proc/{self.process}/fd/{self.descriptor}"
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening anything else may have effects
            raise FileNotFoundError(errno.ENOENT, "that number is no file now", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if os.pread(descriptor, _TOKEN_BYTES, 0) != self.token:
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "that number is another file now", path)
        return descriptor


class SharedFile:
    """A file whose whole length is reserved and mapped; it lives as long as this.

    What a process writes to the mapping is its own: neither the file nor another mapping has it.
    A copy, deep or by pickling, maps the file anew.
    """

    def __init__(self, descriptor: int, token: bytes) -> None:
        self.descriptor = descriptor
        self._token = token
        close = weakref.finalize(self, os.close, descriptor)
        close.atexit = False  # arrays may outlive it until then, and the kernel closes it
        nbytes = os.fstat(descriptor).st_size
        # An array in it keeps the memory mapped.
        self.map = mmap.mmap(descriptor, nbytes, mmap.MAP_PRIVATE | _MAP_NORESERVE)

    @classmethod
    def reserve(cls, nbytes: int) -> SharedFile:
        """Make a file of ``nbytes`` bytes, the token included, in memory or else on disk."""
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
            os.posix_fallocate(file.fileno(), 0, nbytes)
            free = os.statvfs(folder)
            if folder == MEMORY_FOLDER and free.f_bavail * free.f_frsize < LEFT_FREE_BYTES:
                raise OSError(errno.ENOSPC, "MPI needs the space that is left")
            os.pwrite(file.fileno(), token, 0)
            return cls(os.dup(file.fileno()), token)

    @property
    def handle(self) -> SharedMemoryHandle:
        """The handle of this process, since the one that made the file may have ended."""
        return SharedMemoryHandle(socket.gethostname(), os.getpid(), self.descriptor, self._token)

    def __reduce__(self) -> Any:
        return _open_file, (self.handle,)


def write_blocks(descriptor: int, blocks: Iterable[np.ndarray]) -> None:
    """Write uint8 arrays, 1-D, one after another, into a file after its token."""
    offset = ALIGNMENT
    for block in blocks:
        written = 0
        while written < len(block):
            written += os.pwrite(descriptor, block[written:].data, offset + written)
        offset += len(block)


class SharedArray:
    """A data set: the rows of a NumPy array.

    It lies in a shared file, or in this process's own memory until it is first pickled or copied.
    A pickle holds only the file's handle: the same user's processes on this machine can load it,
    while this process has the data set. If this process has written to the array since, it is put
    into another file first.
    """

    def __init__(self, array: np.ndarray, file: SharedFile | None = None, offset: int = 0) -> None:
        """Have an array without objects, to which nothing else refers, or that a file maps there.

        ``offset`` is in bytes from the file's beginning.
        """
        self.array, self._file, self._offset = array, file, offset

    @classmethod
    def load(
        cls, file: SharedFile | None, offset: int, shape: tuple[int, ...], dtype: np.dtype
    ) -> SharedArray:
        """Read an array from a file; an empty one if there is none."""
        if file is None:
            return cls(np.empty(shape, dtype))
        return cls(np.ndarray(shape, dtype, file.map, offset), file, offset)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype) if copy else np.asarray(self.array, dtype)

    def __reduce__(self) -> Any:
        with _sharing:
            file = self._file
            array = self.array
            if array.nbytes and (file is None or _is_written_to(array, file, self._offset)):
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                file = SharedFile.reserve(ALIGNMENT + len(data))
                write_blocks(file.descriptor, [data])
                vars(self).update(vars(self.load(file, ALIGNMENT, array.shape, array.dtype)))
        return self.load, (self._file, self._offset, array.shape, array.dtype)


def _is_written_to(array: np.ndarray, file: SharedFile, offset: int) -> bool:
    """Return whether this process has other bytes than the file from which it maps an array."""
    own = array.reshape(-1).view(np.uint8)
    with mmap.mmap(file.descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        theirs = np.frombuffer(mapped, np.uint8, own.size, offset)
        differs = not np.array_equal(own, theirs)
        del theirs  # or the map can't be closed
    return differs


def _open_file(handle: SharedMemoryHandle) -> SharedFile:
    """Load a pickle of a shared file, or copy one."""
    try:
        return SharedFile(handle.open(), handle.token)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the examples lie in memory of process {handle.process} on {handle.host} and can't "
            f"be reached from process {os.getpid()} on {socket.gethostname()} ({error.strerror}): "
            "a data set that scatter_dataset made is pickled as a reference to that memory; load "
            "it on the same machine, by the same user, while that process has the data set",
        ) from error
