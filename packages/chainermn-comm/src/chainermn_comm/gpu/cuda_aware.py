"""Asks MPI whether it takes pointers to GPU memory (is CUDA-aware)."""

from __future__ import annotations

import ctypes
from functools import cache

from mpi4py import MPI


@cache
def mpi_takes_gpu_memory() -> bool:
    """Return whether this MPI says that it is CUDA-aware, by ``MPIX_Query_cuda_support()``.

    Open MPI, MPICH and MVAPICH have that function; an MPI without it counts as not aware. It is
    looked up in mpi4py's own library, whose dependencies are searched too.
    """
    try:
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return False
    query.argtypes, query.restype = [], ctypes.c_int
    return bool(query() == 1)
