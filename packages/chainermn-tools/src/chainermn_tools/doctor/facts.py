"""What several checks ask about this machine; each is found out once: ``context.once(fact)``."""

from __future__ import annotations

from typing import Any

from chainermn_tools import jobs
from chainermn_tools.doctor.check import Context
from chainermn_tools.environment import mpi, packages, probe

# Most that one small program may take: loading MPI or CUDA from a cold network disk is slow.
PROGRAM_SECONDS = 30.0


def seconds(context: Context) -> float:
    """The limit of a small program: it must not use up what the layer has."""
    return round(min(PROGRAM_SECONDS, context.left()), 1)


def launcher(context: Context) -> dict[str, Any]:
    """The ``mpiexec`` on PATH: ``path``, ``vendor``, ``version``, ``description``.

    Vendor and version are None where ``mpiexec --version`` doesn't say.

    Raises:
        Unavailable: there is none, or it fails or hangs when it is asked.
    """
    return jobs.find_launcher(seconds(context))


def library(context: Context) -> dict[str, Any]:
    """The MPI that mpi4py loads: ``vendor``, ``version``, ``standard``, ``description``...

    Raises:
        Unavailable: mpi4py is not installed, or can't load it.
    """
    found: dict[str, Any] = probe.call_in_subprocess(mpi.library, seconds(context))
    return found


def versions(context: Context) -> dict[str, str | None]:
    """Versions of the distributions that matter; None for one that is not installed."""
    return packages.packages()
