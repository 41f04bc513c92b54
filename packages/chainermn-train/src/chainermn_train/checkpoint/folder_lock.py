"""A file lock that lets one job at a time save under a name, and ends with the job."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import socket
import time
import warnings
from pathlib import Path
from typing import IO

from ..leaving import grace_seconds

RETRY_SECONDS = 0.1  # seldom enough for a file server
# The errors of `flock` on file systems that have no locks.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def acquire_lock(path: Path) -> IO[str]:
    """Return the file of a lock; the lock is held while the file is open.

    If the file system has no locks, a RuntimeWarning says so, and the file is not
    locked.

    Raises:
        ValueError: another job still holds the lock after CHAINERMN_GRACE seconds.
    """
    until = time.monotonic() + grace_seconds()
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink > 0:
                break
            file.close()  # the last holder has removed the file meanwhile
        except BlockingIOError:
            file.close()
            # The lock may be held by a checkpointer of this process that nothing refers to
            # but the traceback of an exception that was handled.
            gc.collect()
            if time.monotonic() > until:
                raise ValueError(
                    f"another job saves under this name: {path.read_text()}, says {path}; it has "
                    f"not ended within {grace_seconds():g} s (CHAINERMN_GRACE). End it (finalize "
                    "it, if it is a checkpointer of this process), or give this run another name "
                    "or folder"
                ) from None
            time.sleep(RETRY_SECONDS)
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                file.close()
                raise
            warnings.warn(
                f"the file system of {path.parent} has no locks: nobody notices if two jobs save "
                "there under one name",
                RuntimeWarning,
                stacklevel=2,
            )
            break
    file.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(f"{socket.gethostname()}, process {os.getpid()}, since {since}")
    file.flush()
    # A worker process may outlive this process, and must not hold the lock then.
    os.register_at_fork(after_in_child=file.close)
    return file
