"""Differentiable communication between ranks, as functions of Chainer's graph."""

from .collectives import (
    allgather,
    allreduce,
    alltoall,
    bcast,
    gather,
    reduce_scatter,
    scatter,
)
from .consensus import capture_error, check_communicator, check_consistent
from .control_dependencies import connect_outputs, pseudo_connect
from .messages import as_integer, check_peer
from .ordered_function import check_variable
from .recv_function import recv, recv_variables
from .send_function import send
from .sync_batch_norm import NAME, SyncBatchNormFunction, sync_batch_norm
from .tensor_parallel_ops import (
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    split_to_region,
)

__all__ = [
    "NAME",
    "SyncBatchNormFunction",
    "allgather",
    "allreduce",
    "alltoall",
    "as_integer",
    "bcast",
    "capture_error",
    "check_communicator",
    "check_consistent",
    "check_peer",
    "check_variable",
    "connect_outputs",
    "copy_to_region",
    "gather",
    "gather_from_region",
    "pseudo_connect",
    "recv",
    "recv_variables",
    "reduce_from_region",
    "reduce_scatter",
    "scatter",
    "send",
    "split_to_region",
    "sync_batch_norm",
]
