"""Files that are either complete or absent, whatever ends the process or the machine."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# Suffix of a file's name until it is complete.
TEMPORARY = ".tmp"


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file of another name for the block to fill; rename it once it is on the disk.

    If anything is raised, the file is removed. An error in closing the file doesn't
    replace the error that the block raised, which other ranks may know.
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
                file.close()
            with contextlib.suppress(OSError):
                temporary.unlink()


@contextlib.contextmanager
def advised(path: Path) -> Iterator[None]:
    """Let errors name the file and a remedy; those of ``write`` and ``fsync`` name no file."""
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
    """Bring the names in a folder to the disk, where its file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
