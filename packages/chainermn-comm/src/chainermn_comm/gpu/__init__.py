"""Means of gradients on GPUs: NCCL, kernels, streams, and MPI between nodes."""

from .factories import FACTORIES
from .inter_node import mpi_takes_gpu_memory
from .nccl import OLDEST as OLDEST_NCCL
from .nccl import unavailable_reason as nccl_unavailable_reason

__all__ = ["FACTORIES", "OLDEST_NCCL", "mpi_takes_gpu_memory", "nccl_unavailable_reason"]
