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
from .consensus import agree, attempt, require_communicator
from .control_dependencies import connect, pseudo_connect
from .messages import as_integer, check_peer
from .point_to_point import receive, recv, send
from .sync_batch_norm import NAME, Normalize, normalize
from .tensor_parallel_ops import join, pick, total, use_everywhere

__all__ = [
    "NAME",
    "Normalize",
    "agree",
    "allgather",
    "allreduce",
    "alltoall",
    "as_integer",
    "attempt",
    "bcast",
    "check_peer",
    "connect",
    "gather",
    "join",
    "normalize",
    "pick",
    "pseudo_connect",
    "receive",
    "recv",
    "reduce_scatter",
    "require_communicator",
    "scatter",
    "send",
    "total",
    "use_everywhere",
]
