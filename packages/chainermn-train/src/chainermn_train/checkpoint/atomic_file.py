"""Files that are either complete or absent, whatever ends the process or the machine."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# The suffix of a file's name until the file is complete.
TEMPORARY = ".tmp"


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file under a temporary name; rename the file once its bytes are on the disk.

    If the block raises, the file is removed. An error in closing the file doesn't
    replace the error of the block, because other ranks may know the error of the block.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    with advised(temporary):
        file = open(temporary, "wb")  # noqa: SIM115
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
                file.close()


@contextlib.contextmanager
def advised(path: Path) -> Iterator[None]:
    """Add a remedy to an OSError, and the file's name, which ``write`` and ``fsync`` leave out."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or os.fspath(path)
            error.strerror = (
                f"{error.strerror}; make room in {path.parent}, let this user write "
                "there, or save in another folder"
            )
        raise


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, if the folder's file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
