"""Files without names that processes of one machine map, in memory or else on disk."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from typing import NamedTuple

MEMORY_FOLDER = "/dev/shm"
# MPI keeps its own buffers in that folder without reserving them, so that filling it to
# the last byte kills ranks later, by SIGBUS. Room for the buffers of some ranks stays
# free.
LEFT_FREE_BYTES = 32 << 20
LINE_BYTES = 64  # arrays begin at cache lines


def reserve(nbytes: int, what: str) -> int:
    """Return the descriptor of a new file of that length; ``what`` is in it, for the error."""
    failures = []
    for folder in dict.fromkeys((MEMORY_FOLDER, tempfile.gettempdir())):
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                # Without this call, a page without room would cause a SIGBUS when a
                # process touches it.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                free = os.statvfs(folder)
                left = free.f_bavail * free.f_frsize
                if folder == MEMORY_FOLDER and left < LEFT_FREE_BYTES:
                    raise OSError("MPI needs the space that is left")
                return os.dup(file.fileno())
        except OSError as error:
            failures.append(f"{folder}: {error.strerror or error}")
    raise OSError(
        errno.ENOSPC,
        f"no place for {nbytes} bytes of {what} ({'; '.join(failures)}); free some space "
        "there, or set TMPDIR to a folder that has it",
    )


class FileReference(NamedTuple):
    """An open file of a process, for the same user's processes on its machine."""

    host: str
    path: str  # by a descriptor of that process
    identity: tuple[int, int, int]  # what tells the file from later ones of that path

    @classmethod
    def of(cls, descriptor: int) -> FileReference:
        """Refer to a file by this process's descriptor of it."""
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        return cls(socket.gethostname(), path, _identity(path))

    def open(self, flags: int) -> int:
        """Return a descriptor of the file; OSError if that process has closed the file."""
        # Opening another file, such as a device, may have effects.
        if _identity(self.path) != self.identity:
            raise FileNotFoundError(errno.ENOENT, "that number is another file now")
        return os.open(self.path, flags | os.O_CLOEXEC)


def _identity(path: str) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_mtime_ns
