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
        with _naming(temporary):
            synced.result()
            os.replace(temporary, path)
        sync_folder(path.parent)

    try:
        with open(temporary, "wb") as file, ThreadPoolExecutor(1) as thread:
            with _naming(temporary):
                fill(file)
                file.flush()
            synced = thread.submit(os.fsync, file.fileno())
            yield complete
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let errors name the file, which those of `write` and `fsync` don't."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
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
