"""The worker processes of Chainer's MultiprocessIterator under MPI."""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from multiprocessing import forkserver
from typing import Any

from chainer.iterators import MultiprocessIterator

# mpi4py reads this variable when it is imported, to decide whether to start MPI then.
_STARTS_MPI = "MPI4PY_RC_INITIALIZE"
# How long a lost wake-up delays a batch; Chainer's iterator polls as often.
_POLL_SECONDS = 0.1
_warned = False


def use_forkserver() -> None:
    """Let ``multiprocessing`` start processes from a clean process instead of forking this one.

    A process that has started MPI must not fork: on InfiniBand, child processes damage
    its memory. Up to Python 3.13, Chainer's ``MultiprocessIterator`` forks. Call this
    function at the beginning of the script's main part, before ``create_communicator``::

        if __name__ == "__main__":
            chainermn.iterators.use_forkserver()

    Worker processes then import the script anew (hence the ``if``), and get the data set
    as a pickle. A worker that imports ``mpi4py.MPI`` doesn't start MPI, which would end
    the job. Each worker draws its own random numbers, also from NumPy's generator.

    Not collective. The function may be called again.

    Raises:
        RuntimeError: ``multiprocessing`` has already been set to another start method.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    if method is None:
        multiprocessing.set_start_method("forkserver")
        # Beside Python's default, the server imports Chainer once, so workers start faster
        # and share its memory.
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


def _before_fork() -> None:
    """Warn, once and on rank 0, if multiprocessing forks a process that has started MPI."""
    # Other code that forks, such as subprocess, replaces the child's program at once.
    global _warned
    caller = sys._getframe(1).f_globals.get("__name__")
    if _warned or caller != "multiprocessing.popen_fork":
        return
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if mpi.COMM_WORLD.rank == 0:
        _warned = True
        warnings.warn(
            "multiprocessing is about to fork a process that has started MPI, which may crash "
            "it, on InfiniBand above all; call chainermn.iterators.use_forkserver() at the "
            "beginning of the script's main part",
            RuntimeWarning,
            stacklevel=2,
        )


os.register_at_fork(before=_before_fork)


def await_workers(iterator: Any) -> None:
    """Wait until a MultiprocessIterator has a batch; do nothing for other iterators."""
    # If an example raises in a worker, the thread that fetches batches ends (a
    # RuntimeError here), and Chainer's iterator would wait without end.
    if not isinstance(iterator, MultiprocessIterator):
        return
    queue = iterator._comm
    loop = iterator._prefetch_loop
    if queue is None or loop.thread is None:
        return  # the iterator is finalized, or makes its first batch here
    with queue._lock:
        while not queue._batch_queue:
            if not loop.thread.is_alive():
                raise RuntimeError(
                    "MultiprocessIterator got no batch: an example raised an error in a worker "
                    "process (its traceback was printed), and the iterator can't go on"
                )
            queue._not_empty_cond.wait(_POLL_SECONDS)
