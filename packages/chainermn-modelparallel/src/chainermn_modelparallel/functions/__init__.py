"""Differentiable communication between ranks, as functions of Chainer's graph."""

from .arguments import check_communicator as check_communicator
from .arguments import check_edge as check_edge
from .arguments import check_variable as check_variable
from .collective_nodes import Inputs as Inputs
from .collective_nodes import apply_collective as apply_collective
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
from .control_dependencies import Variables as Variables
from .control_dependencies import empty_on_device_of as empty_on_device_of
from .control_dependencies import pseudo_connect
from .ordered_function import SCOPE as SCOPE
from .ordered_function import requires_grad_mask as requires_grad_mask
from .send_recv import recv, send
from .send_recv import recv_variables as recv_variables
from .send_recv import send_variables as send_variables
from .sync_batch_norm import SyncBatchNormFunction as SyncBatchNormFunction
from .sync_batch_norm import get_communication_backend as get_communication_backend

# Names for users; all other names are for the links.
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
