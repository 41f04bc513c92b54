"""The table of environment variables that launchers set, forward or obey."""

from __future__ import annotations

from typing import NamedTuple

from _chainermn_events import JOB_VARIABLE, rank_from_env

__all__ = [
    "JOB_VARIABLE",
    "influences_jobs",
    "is_forwarded",
    "rank_from_env",
]


class Variables(NamedTuple):
    """Variables of one subject.

    Attributes:
        prefix: that their names have.
        reported: whether they influence MPI, the BLAS, GPUs or Python.
        forwarded: whether they go to other hosts under Open MPI; MPICH passes on everything.
    """

    prefix: str
    reported: bool = True
    forwarded: bool = False


TABLE = (
    Variables("BLIS_", reported=False, forwarded=True),
    Variables("CHAINER", forwarded=True),
    Variables("CUDA_", forwarded=True),
    Variables("CUPY_", forwarded=True),
    Variables("FI_"),
    Variables("GOTO_", reported=False, forwarded=True),
    Variables("HYDRA_"),
    Variables("I_MPI_"),
    Variables("MKL_", forwarded=True),
    Variables("MPI4PY_", reported=False, forwarded=True),
    Variables("MPICH_"),
    Variables("MPIEXEC_"),
    Variables("MPIR_"),
    Variables("MV2_"),
    Variables("MVP_"),
    Variables("NCCL_", forwarded=True),
    Variables("NVIDIA_"),
    Variables("OMPI_"),
    Variables("OMP_", forwarded=True),
    Variables("OPAL_"),
    Variables("OPENBLAS_", forwarded=True),
    Variables("PMIX_"),
    Variables("PMI_"),
    Variables("PRTE_"),
    Variables("SLURM_"),
    Variables("UCX_", forwarded=True),
)
REPORTED_PREFIXES = tuple(one.prefix for one in TABLE if one.reported)
FORWARDED_PREFIXES = tuple(one.prefix for one in TABLE if one.forwarded)
FORWARDED_NAMES = ("LD_LIBRARY_PATH", "PYTHONPATH")
REPORTED_NAMES = (*FORWARDED_NAMES, "LD_PRELOAD", "PYTHONHOME", "VIRTUAL_ENV")


def influences_jobs(name: str) -> bool:
    """Return whether the variable influences how MPI, the BLAS, the GPUs or Python behave."""
    return name.startswith(REPORTED_PREFIXES) or name in REPORTED_NAMES


def is_forwarded(name: str) -> bool:
    """Return whether every launcher passes the variable on to ranks on other hosts."""
    return name.startswith(FORWARDED_PREFIXES) or name in FORWARDED_NAMES
