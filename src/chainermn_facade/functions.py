"""Differentiable communication between ranks."""

from chainermn_modelparallel import (
    allgather,
    allreduce,
    alltoall,
    bcast,
    gather,
    pseudo_connect,
    recv,
    reduce_scatter,
    scatter,
    send,
)

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
