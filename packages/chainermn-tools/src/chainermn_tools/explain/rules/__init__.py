"""The rules by which failures are recognized: a tuple for each kind of software, and all."""

from chainermn_tools.explain.rules import (
    chainermn,
    gpus,
    mpi4py,
    mpich,
    network,
    ompi,
    python,
    system,
    watchdog,
)
from chainermn_tools.explain.rules.rule import ErrorRule, Kind

__all__ = ["RULES", "ErrorRule", "Kind"]

RULES: tuple[ErrorRule, ...] = (
    *chainermn.RULES,
    *watchdog.RULES,
    *mpi4py.RULES,
    *mpich.RULES,
    *ompi.RULES,
    *network.RULES,
    *gpus.RULES,
    *python.RULES,
    *system.RULES,
)
