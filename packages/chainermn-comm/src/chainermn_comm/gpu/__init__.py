"""Means of gradients on GPUs: NCCL, kernels, streams, and MPI between nodes."""

from .factories import FACTORIES
from .factories import backend_for as backend_for
from .nccl import OLDEST as OLDEST_NCCL
from .nccl import unavailable_reason as nccl_unavailable_reason

__all__ = ["FACTORIES", "OLDEST_NCCL", "nccl_unavailable_reason"]
