"""Whether MPI can run in this process: not in a worker process of a rank."""

from __future__ import annotations

import multiprocessing
import os
import sys

import mpi4py

from _chainermn_events import rank_from_env

# In the commands with which multiprocessing starts a worker, or the server that forks
# workers. Both import the user's script before `parent_process()` is known.
_COMMANDS = (
    "from multiprocessing.spawn import spawn_main",
    "from multiprocessing.forkserver import main",
)


def _rank_of_worker() -> int | None:
    """Return the rank whose worker process this is, or None in any other process.

    A worker is what ``multiprocessing`` starts, and the server that forks workers.
    """
    launched = rank_from_env()
    if launched is None:
        return None
    this_command = " ".join(sys.orig_argv)
    was_started = any(command in this_command for command in _COMMANDS)
    if was_started or multiprocessing.parent_process() is not None:
        return launched[0]
    return None


def keep_workers_from_starting_mpi() -> None:
    """Let an import of ``mpi4py.MPI`` in a worker process of a rank not start MPI.

    The rank's place at the launcher is taken, so MPI would wait there for ever. Called
    before any import that starts MPI. A worker that was forked may have the rank's MPI.
    """
    if _rank_of_worker() is not None:
        mpi4py.rc.initialize = False


def require_running_mpi() -> None:
    """Start MPI if this process hasn't; raise RuntimeError where it can't be used."""
    keep_workers_from_starting_mpi()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            "no MPI library can be loaded: pip install mpich, or load your site's module, "
            "such as `module load openmpi`, and start the job by that MPI's mpiexec"
        ) from error

    if MPI.Is_finalized():
        raise RuntimeError("MPI has been finalized; create communicators before that")
    if MPI.Is_initialized():
        return
    rank = _rank_of_worker()
    if rank is None:
        raise RuntimeError(
            "MPI has not been initialized, since mpi4py.rc.initialize is False; call "
            "MPI.Init() before you create a communicator"
        )
    raise RuntimeError(
        f"rank {rank}: a communicator was to be made in a worker process (process "
        f"{os.getpid()} of multiprocessing), which can't be a rank. Workers import the script "
        'anew: put what creates a communicator below `if __name__ == "__main__":`'
    )
