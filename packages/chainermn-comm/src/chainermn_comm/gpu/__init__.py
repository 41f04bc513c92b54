"""What serves arrays on GPUs: NCCL, kernels, streams, and MPI between nodes."""

from .factories import BACKENDS
from .nccl import OLDEST as OLDEST_NCCL
from .nccl import unavailable_reason as nccl_unavailable_reason

__all__ = ["BACKENDS", "OLDEST_NCCL", "nccl_unavailable_reason"]
