"""The known failures: a tuple of rows for each kind of software, and all of them together."""

from chainermn_tools.explain.known import (
    gpus,
    mpi4py,
    mpich,
    network,
    ompi,
    ours,
    python,
    system,
    watchdog,
)
from chainermn_tools.explain.known.row import Kind, Known

__all__ = ["KNOWN", "Kind", "Known"]

KNOWN: tuple[Known, ...] = (
    *ours.ROWS,
    *watchdog.ROWS,
    *mpi4py.ROWS,
    *mpich.ROWS,
    *ompi.ROWS,
    *network.ROWS,
    *gpus.ROWS,
    *python.ROWS,
    *system.ROWS,
)
