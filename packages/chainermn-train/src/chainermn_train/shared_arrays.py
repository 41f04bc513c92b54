"""NumPy arrays that processes of one machine share: mapped from a file that no folder lists.

Such an array is pickled as the place where it lies, so that worker processes map the same
memory. Nobody else's arrays can be changed, as all of them are read-only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import socket
import stat
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

MEMORY_FOLDER = "/dev/shm"
# MPI keeps its own buffers in that folder without reserving them, so that filling it to the
# last byte kills ranks later, by SIGBUS. Room for the buffers of some ranks stays free.
LEFT_FREE_BYTES = 32 << 20
# A file begins with its token; arrays after it begin at multiples of a cache line.
ALIGNMENT = 64
_TOKEN_BYTES = 32

_open_files: weakref.WeakValueDictionary[bytes, SharedFile] = weakref.WeakValueDictionary()


class Address(NamedTuple):
    """Where other processes find a file: it is open in this process, under this number."""

    host: str
    process: int
    descriptor: int
    token: bytes  # tells it from another file that got the number since, or on another machine

    def open(self, mode: int) -> int:
        """Open the file anew and return the descriptor.

        Raises:
            OSError: it can't be reached from this process.
        """
        path = f"/proc/{self.process}/fd/{self.descriptor}"
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening anything else may have effects
            raise FileNotFoundError(errno.ENOENT, "that number is no file now", path)
        descriptor = os.open(path, mode | os.O_CLOEXEC)
        if os.pread(descriptor, _TOKEN_BYTES, 0) != self.token:
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "that number is another file now", path)
        return descriptor


class SharedFile:
    """A file whose whole length is reserved and mapped read-only; it lives as long as this."""

    def __init__(self, descriptor: int, token: bytes) -> None:
        self.descriptor = descriptor
        self._token = token
        close = weakref.finalize(self, os.close, descriptor)
        close.atexit = False  # arrays may outlive it until then, and the kernel closes it
        self.nbytes = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.nbytes, access=mmap.ACCESS_READ)
        _open_files[token] = self

    @classmethod
    def reserve(cls, nbytes: int) -> SharedFile:
        """Make a file of so many bytes, the token included, in memory or else on disk.

        Raises:
            OSError: neither has the room.
        """
        failures = []
        for folder in dict.fromkeys((MEMORY_FOLDER, tempfile.gettempdir())):
            try:
                return cls._reserve_in(folder, nbytes)
            except OSError as error:  # noqa: PERF203
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
            # Else a page that can't be had is a SIGBUS when it is touched.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            free = os.statvfs(folder)
            if folder == MEMORY_FOLDER and free.f_bavail * free.f_frsize < LEFT_FREE_BYTES:
                raise OSError(errno.ENOSPC, "MPI needs the space that is left")
            os.pwrite(file.fileno(), token, 0)
            return cls(os.dup(file.fileno()), token)

    @classmethod
    def at(cls, address: Address) -> SharedFile:
        """The file at an address, mapped once in a process.

        Raises:
            OSError: it can't be reached from this process.
        """
        return _open_files.get(address.token) or cls(address.open(os.O_RDONLY), address.token)

    @property
    def address(self) -> Address:
        # Of this process and not of the one that made the file, which may have ended.
        return Address(socket.gethostname(), os.getpid(), self.descriptor, self._token)

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A read-only view, which keeps the memory mapped for as long as it lives itself."""
        return np.ndarray(shape, dtype, self._map, offset)

    def write(self, data: np.ndarray, offset: int) -> None:
        """Write bytes (uint8, 1-D) at an offset."""
        _write(self.descriptor, data, offset)

    def wait_until_written(self) -> None:
        """Sleep until nobody is `writing` at this file's address."""
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def writing(address: Address) -> Iterator[int | None]:
    """A descriptor to write to the file at an address; None if it can't be reached from here.

    Who waits for it to be written goes on at the end of the `with`, or of this process.
    """
    try:
        descriptor = address.open(os.O_RDWR)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        # Closing would do, were there no child process that a thread forks meanwhile.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def fill(descriptor: int, data: Iterable[np.ndarray]) -> None:
    """Write bytes (uint8 arrays, 1-D) to a file, one after another, after its token."""
    offset = ALIGNMENT
    for block in data:
        _write(descriptor, block, offset)
        offset += len(block)


def _write(descriptor: int, data: np.ndarray, offset: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:].data, offset + written)


class SharedArray:
    """A data set: the rows of a read-only NumPy array that lies in a shared file.

    Copies are the same object. A pickle holds only where the array lies; it can be loaded by
    processes of the same user on this machine, while this process has the data set.
    """

    def __init__(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Nothing can be read before `attach`.

        Args:
            offset: where the array begins in its file.
            shape, dtype: of the array; the dtype holds no Python objects.
        """
        self.offset = offset
        self.shape = shape
        self.dtype = dtype
        self._file: SharedFile | None = None

    def attach(self, file: SharedFile | None) -> SharedArray:
        """Let the array be what the file holds, or empty if there is none; return it."""
        self._file = file
        if file is None:
            self.array = np.empty(self.shape, self.dtype)
            self.array.flags.writeable = False
        else:
            self.array = file.array(self.offset, self.shape, self.dtype)
        return self

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype) if copy else np.asarray(self.array, dtype)

    def __copy__(self) -> SharedArray:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> SharedArray:
        return self

    def __reduce__(self) -> Any:
        address = None if self._file is None else self._file.address
        return _find, (address, self.offset, self.shape, self.dtype)


def _find(
    address: Address | None, offset: int, shape: tuple[int, ...], dtype: np.dtype
) -> SharedArray:
    """What a pickle of a shared array is loaded by."""
    try:
        file = None if address is None else SharedFile.at(address)
    except OSError as error:
        assert address is not None
        raise OSError(
            error.errno,
            f"the examples lie in memory of process {address.process} on {address.host} and can't "
            f"be reached from process {os.getpid()} on {socket.gethostname()} ({error.strerror}): "
            "a data set that scatter_dataset made is pickled as a reference to that memory; load "
            "it on the same machine, by the same user, while that process has the data set",
        ) from error
    return SharedArray(offset, shape, dtype).attach(file)
