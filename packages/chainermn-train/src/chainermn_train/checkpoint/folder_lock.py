"""A lock of the kernel's, by which one job at a time saves under a name; it ends with the job."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import warnings
from pathlib import Path
from typing import IO
from weakref import WeakSet

# What is raised where a file system has no locks.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

_held: WeakSet[IO[str]] = WeakSet()


def take_lock(path: Path) -> IO[str] | None:
    """Return the file of a lock, which is held while the file is open.

    BlockingIOError if another process holds the lock. Where the file system has no
    locks, a RuntimeWarning says so, and there is none.
    """
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed the file meanwhile.
            if os.fstat(file.fileno()).st_nlink:
                since = time.strftime("%Y-%m-%d %H:%M:%S")
                file.truncate(0)
                file.write(
                    f"{socket.gethostname()}, process {os.getpid()}, since {since}"
                )
                file.flush()
                _held.add(file)
                return file
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            warnings.warn(
                f"the file system of {path.parent} has no locks: nobody notices if two jobs save "
                "there under one name, and what a killed job was writing stays",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        finally:
            if file not in _held:
                file.close()


def _close_all() -> None:
    """Close the files, as a worker process may outlive the one that holds the locks."""
    for file in _held:
        file.close()


os.register_at_fork(after_in_child=_close_all)
