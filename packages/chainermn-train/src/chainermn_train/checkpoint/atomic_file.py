"""Files that are either complete or absent, whatever ends the process or the machine."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

# Suffix of a file's name until it is complete; see atomic_write.
TEMPORARY = ".tmp"
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class FileDigest:
    """The size and the checksum of a complete file."""

    size: int  # bytes
    sha256: str  # hexadecimal


class HashingFile:
    """A file that is written in order, and the checksum of what has been written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.flush = file.flush
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write all of ``data``, bytes or a contiguous buffer; return its number of bytes."""
        view = memoryview(data).cast("B")
        self.sha256.update(view)
        return self._file.write(view)


def atomic_write(path: Path, fill: Callable[[HashingFile], Any]) -> FileDigest:
    """Write or replace a file, all of it or (OSError) nothing; return its digest."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "wb") as file:
            hashing = HashingFile(file)
            fill(hashing)
            digest = FileDigest(file.tell(), hashing.sha256.hexdigest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = os.fspath(temporary)  # `write` and `fsync` don't name the file
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)
    return digest


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


def digest_of(file: BinaryIO) -> FileDigest:
    """Return the digest of an open file, which is read from its beginning to its end."""
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(_READ_BYTES):
        digest.update(block)
    return FileDigest(file.tell(), digest.hexdigest())
