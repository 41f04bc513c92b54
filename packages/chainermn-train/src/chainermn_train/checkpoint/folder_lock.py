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

# What is raised where a file system has no locks.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def take_lock(path: Path) -> IO[str] | None:
    """Return the file of a lock, which is held while the file is open.

    BlockingIOError if the lock is held already. Where the file system has no locks, a
    RuntimeWarning says so, and there is none.
    """
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno not in _WITHOUT_LOCKS:
            raise
        warnings.warn(
            f"the file system of {path.parent} has no locks: nobody notices if two jobs save "
            "there under one name, and what a killed job was writing stays",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    if os.fstat(file.fileno()).st_nlink == 0:
        file.close()  # its last holder has removed the file meanwhile
        return take_lock(path)
    file.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(f"{socket.gethostname()}, process {os.getpid()}, since {since}")
    file.flush()
    # A worker process may outlive the one that holds the lock.
    os.register_at_fork(after_in_child=file.close)
    return file
