"""The report: every probe's answer, in sections."""

from __future__ import annotations

from typing import Any

from chainermn_tools.environment import probe
from chainermn_tools.environment.blas import blas
from chainermn_tools.environment.gpus import gpus
from chainermn_tools.environment.machine import machine
from chainermn_tools.environment.mpi import mpi
from chainermn_tools.environment.packages import imports, packages, python
from chainermn_tools.environment.topology import topology
from chainermn_tools.environment.variables import variables

# Raised when a key of the report changes its name or its meaning.
SCHEMA = 1
# Limit of each child process: loading CUDA from a cold network disk takes several seconds.
SECONDS = 20.0


def collect(seconds: float = SECONDS) -> dict[str, Any]:
    """Look at this machine and what is installed on it.

    Collective if an MPI launcher started this process; then rank 0's ``topology`` shows all
    ranks, and the rest is about this process and its machine.

    Args:
        seconds: limit of each program that is asked. They run side by side, so the whole
            takes little longer.

    Returns:
        What JSON can hold. ``schema`` is the version of the other keys. A part that could not
        be found out, at any depth, is ``{"unavailable": reason}``. Keys ending in ``_bytes``
        are numbers of bytes; None stands for what is not installed or not set.
    """
    answers = probe.run_concurrently(
        {
            "python": python,
            "packages": packages,
            "imports": imports,
            "mpi": lambda: mpi(seconds),
            "topology": lambda: topology(seconds),
            "machine": lambda: machine(seconds),
            "blas": lambda: probe.call_in_subprocess(blas, seconds),
            "gpus": lambda: gpus(seconds),
            "variables": variables,
        },
        seconds + 2 * probe.MARGIN_SECONDS,
    )
    return {"schema": SCHEMA, **answers}
