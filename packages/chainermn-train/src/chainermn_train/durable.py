"""Writes files that are whole or not there at all, whatever ends the process or the machine."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

# What a file is called until it is whole; see write_durably.
TEMPORARY = ".tmp"
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Contents:
    """What a whole file holds."""

    size: int  # bytes
    sha256: str  # hexadecimal


class HashingFile:
    """A file to write in order, which knows what has been written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: Any) -> int:
        """Write all of ``data``, bytes or a contiguous buffer; returns its number of bytes."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._file.write(view)
        self._size += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        self._file.flush()

    def contents(self) -> Contents:
        return Contents(self._size, self._hash.hexdigest())


def write_durably(path: Path, fill: Callable[[HashingFile], Any]) -> Contents:
    """Write a file so that it has its name only when all of it is on the disk.

    Args:
        path: its name; a file there is replaced. Its folder must exist.
        fill: writes the contents.

    Returns:
        What was written, which is what was meant to be on the disk.

    Raises:
        OSError: the file could not be written; nothing of it is left.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "wb") as file:
            hashing = HashingFile(file)
            fill(hashing)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = os.fspath(temporary)  # `write` and `fsync` don't say which file it was
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)
    return hashing.contents()


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where its file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def contents_of(file: BinaryIO) -> Contents:
    """What an open file holds, from its beginning; it is read to its end."""
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(_READ_BYTES):
        digest.update(block)
    return Contents(file.tell(), digest.hexdigest())
