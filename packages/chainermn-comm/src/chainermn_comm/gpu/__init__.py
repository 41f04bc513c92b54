"""Means of gradients on GPUs: NCCL, kernels, streams, and MPI between nodes."""

from .cuda_aware import mpi_takes_gpu_memory
from .factories import FACTORIES
from .nccl import OLDEST as OLDEST_NCCL
from .nccl import unavailable_reason as nccl_unavailable_reason

__all__ = ["FACTORIES", "OLDEST_NCCL", "mpi_takes_gpu_memory", "nccl_unavailable_reason"]
