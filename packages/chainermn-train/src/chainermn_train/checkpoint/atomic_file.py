"""Files that are either complete or absent, whatever ends the process or the machine."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

# Suffix of a file's name until it is complete.
TEMPORARY = ".tmp"
BegunFile: TypeAlias = contextlib.AbstractContextManager[Callable[[], None]]


@contextlib.contextmanager
def begun(path: Path, fill: Callable[[BinaryIO], Any]) -> Iterator[Callable[[], None]]:
    """Write a file under another name, which goes to the disk while the block runs.

    What it yields gives the file its name, all of it or (OSError) nothing. Otherwise
    nothing stays.
    """
    temporary = path.with_name(path.name + TEMPORARY)

    def complete() -> None:
        with advised(temporary):
            synced.result()
            os.replace(temporary, path)
            sync_folder(path.parent)

    with contextlib.ExitStack() as stack:
        with advised(temporary):
            file = stack.enter_context(_opened(temporary))
            fill(file)
            file.flush()
        thread = stack.enter_context(ThreadPoolExecutor(1))
        synced = thread.submit(os.fsync, file.fileno())
        yield complete


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a new file; remove it in the end, unless it has got another name."""
    file = open(path, "wb")  # noqa: SIM115
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        # Where a write has failed, closing tries again, and would raise in its place.
        with contextlib.suppress(OSError):
            file.close()


@contextlib.contextmanager
def advised(path: Path) -> Iterator[None]:
    """Let errors name the file, which those of ``write`` and ``fsync`` don't, and a remedy."""
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
