"""What serves arrays on GPUs: NCCL, kernels, streams, and MPI between nodes."""

from .backend import NcclBackend as NcclBackend
from .factories import nccl_everywhere as nccl_everywhere
from .factories import nccl_in_nodes as nccl_in_nodes
from .factories import nccl_multi_leader as nccl_multi_leader
from .factories import nccl_single_leader as nccl_single_leader
from .factories import staged_sum as staged_sum
from .nccl import OLDEST as OLDEST_NCCL
from .nccl import unavailable_reason as nccl_unavailable_reason

__all__ = ["OLDEST_NCCL", "nccl_unavailable_reason"]
