"""Checks that MPI can run in this process, and knows the ranks that were started."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import mpi4py

from _chainermn_events import rank_from_env

from .environment import ALONE_VARIABLE, switch

if TYPE_CHECKING:
    from mpi4py import MPI

# In the commands with which multiprocessing starts a worker, or the server that forks
# workers. Both import the user's script before `parent_process()` is known.
_COMMANDS = (
    "from multiprocessing.spawn import spawn_main",
    "from multiprocessing.forkserver import main",
)


def _rank_of_worker() -> int | None:
    """Return the rank whose worker process this is, or None in any other process.

    A worker is a process that ``multiprocessing`` starts, including the server that
    forks workers.
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

    The rank's place at the launcher is taken, so MPI would wait there for ever. The
    function is called before any import that starts MPI. A forked worker may have the
    rank's MPI.
    """
    if _rank_of_worker() is not None:
        mpi4py.rc.initialize = False


def require_running_mpi() -> None:
    """Start MPI if it isn't running; raise RuntimeError if it can't be used."""
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


def refuse_to_be_alone(mpi_comm: MPI.Intracomm | None) -> None:
    """Raise RuntimeError, or warn, if MPI knows only this rank but the launcher started several.

    A process that no launcher started may go on alone, and says so.
    """
    from mpi4py import MPI

    if mpi_comm not in (None, MPI.COMM_WORLD):
        return
    if MPI.COMM_WORLD.size > 1 or MPI.Comm.Get_parent() != MPI.COMM_NULL:
        return
    launched = rank_from_env()
    if launched is None:
        _say_alone()
        return
    rank, size = launched
    # A launcher that doesn't tell the size has started several if this isn't rank 0.
    if size == 1 or (size is None and rank == 0):
        return
    # A process that a rank has started inherits the rank's variables.
    with suppress(OSError):
        if "libmpi" in Path(f"/proc/{os.getppid()}/maps").read_text():
            return
    vendor = MPI.get_vendor()[0]
    pmi = "pmix" if vendor == "Open MPI" else "pmi2"
    text = (
        f"a launcher started this as rank {rank} of {size or 'several'}, but it is alone in its "
        f"MPI. Take {vendor}'s own mpiexec, or srun --mpi={pmi}; "
        "`chainermn doctor` says more. CHAINERMN_ALLOW_ALONE=1 lets each train alone"
    )
    if not switch(ALONE_VARIABLE):
        raise RuntimeError(text)
    warnings.warn(text, stacklevel=3)


@functools.cache
def _say_alone() -> None:
    """Print once that this is the only rank, in case the user has forgotten mpiexec."""
    if not switch(ALONE_VARIABLE):
        print(
            "ChainerMN: this process is the only rank, since no mpiexec started it. For 4 ranks: "
            f"mpiexec -n 4 python train.py. {ALONE_VARIABLE}=1 leaves this line out",
            file=sys.stderr,
            flush=True,
        )


def warn_of_small_shm() -> None:
    """Print a warning if MPICH would end by a signal or wait for ever at its start."""
    if "mpi4py.MPI" in sys.modules:
        return
    try:
        ranks = int(os.environ.get("MPI_LOCALNRANKS", 0))
        rank = int(os.environ.get("MPI_LOCALRANKID", 0))
        found = os.statvfs("/dev/shm")
    except (OSError, ValueError):  # the warning is only a hint
        return
    size = found.f_blocks * found.f_frsize >> 20
    needed = 5 * ranks
    # A few ranks need less.
    if rank == 0 and ranks >= 8 and size < needed:
        print(
            f"ChainerMN: /dev/shm has {size} MB, and MPICH needs {needed} MB for {ranks} "
            "ranks: docker run --shm-size=1g",
            file=sys.stderr,
            flush=True,
        )
