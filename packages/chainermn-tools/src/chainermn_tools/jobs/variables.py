"""The table of environment variables that influence jobs, and that launchers forward."""

from __future__ import annotations

# Prefixes of variables that influence how MPI, the BLAS, GPUs or Python behave, or that
# Open MPI passes on to other hosts (MPICH passes on all variables), or both.
REPORTED = (
    "FI_",
    "HYDRA_",
    "I_MPI_",
    "MPICH_",
    "MPIEXEC_",
    "MPIR_",
    "MV2_",
    "MVP_",
    "NVIDIA_",
    "OMPI_",
    "OPAL_",
    "PMIX_",
    "PMI_",
    "PRTE_",
    "SLURM_",
)
FORWARDED = ("BLIS_", "GOTO_", "MPI4PY_")
BOTH = ("CHAINER", "CUDA_", "CUPY_", "MKL_", "NCCL_", "OMP_", "OPENBLAS_", "UCX_")
FORWARDED_NAMES = ("LD_LIBRARY_PATH", "PYTHONPATH")
REPORTED_NAMES = (*FORWARDED_NAMES, "LD_PRELOAD", "PYTHONHOME", "VIRTUAL_ENV")


def influences_jobs(name: str) -> bool:
    """Return whether the variable influences how MPI, the BLAS, the GPUs or Python behave."""
    return name.startswith(REPORTED + BOTH) or name in REPORTED_NAMES


def is_forwarded(name: str) -> bool:
    """Return whether every launcher passes the variable on to ranks on other hosts."""
    return name.startswith(FORWARDED + BOTH) or name in FORWARDED_NAMES
