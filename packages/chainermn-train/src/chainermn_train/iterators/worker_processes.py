"""The worker processes of Chainer's MultiprocessIterator under MPI."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import warnings
from multiprocessing import forkserver
from typing import Any

from chainer.iterators import MultiprocessIterator

# mpi4py reads this variable when it is imported: whether to start MPI then.
_STARTS_MPI = "MPI4PY_RC_INITIALIZE"
# How long a lost wake-up delays a batch; Chainer's iterator polls as often.
_POLL_SECONDS = 0.1
_FORKS = (
    "is about to fork a process that has started MPI, which may crash it, on InfiniBand above "
    "all; call chainermn.iterators.use_forkserver() at the beginning of the script's main part"
)

_warned = False


def use_forkserver() -> None:
    """Have ``multiprocessing`` start processes from a clean one, not by forking this one.

    A process that has started MPI must not fork: on InfiniBand, children damage its memory.
    Chainer's ``MultiprocessIterator`` starts them by fork up to Python 3.13. Call this
    at the beginning of the script's main part, before ``create_communicator``::

        if __name__ == "__main__":
            chainermn.iterators.use_forkserver()

    Workers then import the script anew (hence the ``if``), and get the data set as a
    pickle. A worker that imports ``mpi4py.MPI`` on the way does not start MPI, which
    would end the job. Each draws random numbers of its own, from NumPy's generator too.

    It may be called again. Not collective.

    Raises:
        RuntimeError: processes have been set to be started by forking already.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    if method is None:
        multiprocessing.set_start_method("forkserver")
        # Python's default, and Chainer: workers start faster, and share its memory,
        # where they don't import it themselves.
        multiprocessing.set_forkserver_preload(
            ["__main__", f"{__package__}.forkserver_preload"]
        )
    elif method != "forkserver":
        raise RuntimeError(
            f"use_forkserver: multiprocessing starts processes by {method!r} already; call it "
            "first of all, and set_start_method nowhere else"
        )
    before = os.environ.get(_STARTS_MPI)
    # The server inherits it, and the workers from the server.
    os.environ[_STARTS_MPI] = "0"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ[_STARTS_MPI]
        else:
            os.environ[_STARTS_MPI] = before


def warn_of_fork(iterator: Any) -> None:
    """Warn, once in this process, if the iterator's workers would be forked from one with MPI."""
    global _warned
    if _warned or not isinstance(iterator, MultiprocessIterator) or not _has_mpi():
        return
    method = multiprocessing.get_start_method(allow_none=True)
    if (method or multiprocessing.get_all_start_methods()[0]) == "fork":
        _warned = True
        warnings.warn(f"MultiprocessIterator {_FORKS}", RuntimeWarning, stacklevel=3)


def _before_fork() -> None:
    """Warn, once and on rank 0, if multiprocessing forks a process that has started MPI."""
    # An iterator that no function of ours has seen starts its workers so. What else
    # forks, such as subprocess, goes on to another program at once.
    global _warned
    if (
        _warned
        or sys._getframe(1).f_globals.get("__name__") != "multiprocessing.popen_fork"
    ):
        return
    if _has_mpi() and sys.modules["mpi4py.MPI"].COMM_WORLD.rank == 0:
        _warned = True
        warnings.warn(f"multiprocessing {_FORKS}", RuntimeWarning, stacklevel=2)


os.register_at_fork(before=_before_fork)


def _has_mpi() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()


def await_workers(iterator: Any) -> None:
    """Wait until a MultiprocessIterator has a batch; do nothing for other iterators."""
    # An example that raises in a worker ends the thread that fetches batches (a
    # RuntimeError here), and Chainer's iterator would wait for it without end.
    if not isinstance(iterator, MultiprocessIterator):
        return
    queue, loop = iterator._comm, iterator._prefetch_loop
    # Finalized, or it makes its first batch here.
    if queue is None or loop.thread is None:
        return
    began = time.monotonic()
    with queue._lock:
        while not queue._batch_queue:
            if not loop.thread.is_alive():
                raise RuntimeError(
                    "MultiprocessIterator got no batch: an example raised an error in a worker "
                    "process (its traceback was printed), and the iterator can't go on"
                )
            queue._not_empty_cond.wait(_POLL_SECONDS)
            limit = iterator.dataset_timeout
            if limit is not None and time.monotonic() - began > limit:
                began = time.monotonic()
                warnings.warn(
                    f"MultiprocessIterator has been waiting for a batch for {limit} s",
                    MultiprocessIterator.TimeoutWarning,
                    stacklevel=3,
                )
