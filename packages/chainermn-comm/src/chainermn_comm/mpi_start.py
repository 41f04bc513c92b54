"""Whether MPI can run in this process: not in a worker process of a rank."""

from __future__ import annotations

import multiprocessing
import os
import sys

import mpi4py

from _chainermn_events import rank_from_env


def refuse_in_worker(what: str) -> None:
    """Raise RuntimeError if ``what`` would start MPI in a worker process of a rank.

    The rank's place at the launcher is taken, so MPI waits there for ever. A worker is
    what ``multiprocessing`` starts; one that is forked has the rank's MPI already.
    """
    if "mpi4py.MPI" in sys.modules or multiprocessing.parent_process() is None:
        return
    launched = rank_from_env()
    if launched is None:
        return
    raise RuntimeError(
        f"rank {launched[0]}: {what} would start MPI in a worker process (process {os.getpid()} "
        "of multiprocessing), which can't be a rank. Workers import the script anew: put what "
        'creates a communicator below `if __name__ == "__main__":`, and import no '
        "mpi4py.MPI above it"
    )


def refuse_if_importing_starts_mpi() -> None:
    """Raise as above where an import of ``mpi4py.MPI`` would start it in a worker."""
    if mpi4py.rc.initialize:
        refuse_in_worker("this import")


def require_running_mpi() -> None:
    """Start MPI if this process hasn't; raise RuntimeError where it can't be used."""
    refuse_in_worker("a communicator")
    from mpi4py import MPI

    if MPI.Is_finalized():
        raise RuntimeError("MPI has been finalized; create communicators before that")
    if not MPI.Is_initialized():
        raise RuntimeError(
            "MPI has not been initialized, since mpi4py.rc.initialize is False; call "
            "MPI.Init() before you create a communicator"
        )
