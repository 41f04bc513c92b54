"""NumPy arrays that processes of one machine share: mapped from a file that no folder lists.

Such an array is pickled as the place where it lies, so that worker processes map the same
memory. All of them are read-only, so that nobody changes another's.
"""

from __future__ import annotations

import errno
import fcntl
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

_sharing = threading.Lock()  # an array goes into one file, whoever pickles it first
_open_files: weakref.WeakValueDictionary[bytes, SharedFile] = weakref.WeakValueDictionary()


class Address(NamedTuple):
    """Where other processes find a file: it is open in this process, under this number."""

    host: str
    process: int
    descriptor: int
    token: bytes  # tells it from another file that got the number since, or on another machine

    def open(self) -> int:
        """Open the file anew, for reading, and return the descriptor.

        Raises:
            OSError: it can't be reached from this process.
        """
        path = f"/proc/{self.process}/fd/{self.descriptor}"
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening anything else may have effects
            raise FileNotFoundError(errno.ENOENT, "that number is no file now", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
        return _open_files.get(address.token) or cls(address.open(), address.token)

    @property
    def address(self) -> Address:
        """Where others find it now."""
        # Of this process and not of the one that made the file, which may have ended.
        return Address(socket.gethostname(), os.getpid(), self.descriptor, self._token)

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A read-only view, which keeps the memory mapped for as long as it lives itself."""
        view: np.ndarray = np.ndarray(shape, dtype, self._map, offset)
        return view

    def fill(self, data: Iterable[np.ndarray]) -> None:
        """Write bytes (uint8 arrays, 1-D), one after another, after the token."""
        offset = ALIGNMENT
        for block in data:
            self.write(block, offset)
            offset += len(block)

    def write(self, data: np.ndarray, offset: int) -> None:
        """Write bytes (uint8, 1-D) at an offset."""
        written = 0
        while written < len(data):
            written += os.pwrite(self.descriptor, data[written:].data, offset + written)

    # Others can wait for the process that made a file, asleep, until it says so or ends.

    def shut(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)

    def open(self) -> None:
        # Closing it would do, were there no child process that a thread forks meanwhile.
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def wait_until_open(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)


class SharedArray:
    """A data set: the rows of a read-only NumPy array.

    It lies in a shared file, or in this process's own memory until it is pickled for the first
    time, which puts it into a file. A pickle holds only where that is; it can be loaded by
    processes of the same user on this machine, while this process has the data set. Copies are
    the same object.
    """

    def __init__(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Nothing can be read before `attach` or `hold`.

        Args:
            offset: where the array begins in its file.
            shape: of the array.
            dtype: of the array; it holds no Python objects.
        """
        self.offset = offset
        self.shape = shape
        self.dtype = dtype
        self._file: SharedFile | None = None

    def attach(self, file: SharedFile | None) -> SharedArray:
        """Let the array be what the file holds, or empty if there is none; return it."""
        if file is None:
            return self.hold(np.empty(self.shape, self.dtype))
        self.array = file.array(self.offset, self.shape, self.dtype)
        self._file = file
        return self

    def hold(self, array: np.ndarray) -> SharedArray:
        """Let the array be this one, which nobody else has; return it."""
        self.array = array
        self.array.flags.writeable = False
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
        with _sharing:
            if self._file is None and self.array.nbytes:
                self._share()
        address = None if self._file is None else self._file.address
        return _find, (address, self.offset, self.shape, self.dtype)

    def _share(self) -> None:
        data = np.ascontiguousarray(self.array).reshape(-1).view(np.uint8)
        file = SharedFile.reserve(ALIGNMENT + len(data))
        file.write(data, ALIGNMENT)
        self.offset = ALIGNMENT
        self.attach(file)


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
