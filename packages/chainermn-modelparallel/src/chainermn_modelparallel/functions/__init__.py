"""Differentiable communication between ranks, as functions of Chainer's graph."""

from .arguments import check_communicator as check_communicator
from .arguments import check_edge as check_edge
from .arguments import check_integer as check_integer
from .arguments import check_variable as check_variable
from .collective_nodes import Inputs as Inputs
from .collective_nodes import array_specs as array_specs
from .collectives import (
    allgather,
    allreduce,
    alltoall,
    bcast,
    gather,
    reduce_scatter,
    scatter,
)
from .control_dependencies import connect_outputs as connect_outputs
from .control_dependencies import pseudo_connect
from .send_recv import recv, send
from .send_recv import recv_variables as recv_variables
from .sync_batch_norm import SyncBatchNormFunction as SyncBatchNormFunction
from .sync_batch_norm import get_communication_backend as get_communication_backend
from .sync_batch_norm import sync_batch_norm as sync_batch_norm
from .tensor_parallel_ops import copy_to_region as copy_to_region
from .tensor_parallel_ops import gather_from_region as gather_from_region
from .tensor_parallel_ops import reduce_from_region as reduce_from_region
from .tensor_parallel_ops import split_to_region as split_to_region

# What users may use; the other names are for the links.
__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "bcast",
    "gather",
    "pseudo_connect",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
]
