"""Communicators that somebody else wrote: the wrappers may use their public methods only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from chainermn_comm import CommunicatorBase

# For tests of model parallelism whose `comm` says something of a third party's, too: by
# default.
WITH_THIRD_PARTY = pytest.mark.parametrize(
    "comm", ["naive", "third party"], indirect=True
)


class PlainCommunicator(CommunicatorBase):
    """Nothing but the abstract members, over mpi4py's pickles.

    Its `bcast_data` is the simplest that can be: it knows nothing of lazy
    initialisation.
    """

    rank = property(lambda self: self.mpi.rank)
    size = property(lambda self: self.mpi.size)
    intra_rank = rank
    inter_rank = property(lambda self: 0)
    inter_size = property(lambda self: 1)

    def __init__(self, mpi):
        self.mpi = mpi

    def split(self, color, key):
        return PlainCommunicator(self.mpi.Split(color, key))

    def send(self, data, dest, tag):
        self.mpi.send(data, dest, tag)

    def recv(self, source, tag):
        return self.mpi.recv(source=source, tag=tag)

    def bcast(self, data, max_buf_len=None, root=0):
        return self.mpi.bcast(data, root)

    def gather(self, data, root=0):
        return self.mpi.gather(data, root)

    def alltoall(self, xs):
        return tuple(self.mpi.alltoall(xs))

    def allreduce(self, data, op="sum"):
        if op == "sum":
            return self.allreduce_obj(data)
        return super().allreduce(data, op)

    def allreduce_obj(self, obj):
        return sum(self.mpi.allgather(obj))

    send_obj = send
    recv_obj = recv
    bcast_obj = bcast
    gather_obj = gather

    def bcast_data(self, model):
        for _, param in sorted(model.namedparams()):
            if param.data is not None:
                param.data[...] = self.mpi.bcast(param.data)

    def allreduce_grad(self, model):
        for _, param in sorted(model.namedparams()):
            if param.grad is not None:
                # A sum of float16 would overflow where the mean doesn't.
                wide = param.grad.astype(np.result_type(param.grad, np.float32))
                mean = self.allreduce(wide) / self.size
                param.grad = np.asarray(mean, param.grad.dtype)


class Inheriting(PlainCommunicator):
    """Takes from the base class what it can."""

    def allreduce(self, data, op="sum"):
        return CommunicatorBase.allreduce(self, data, op)

    def split(self, color, key):
        return Inheriting(self.mpi.Split(color, key))


class WatchedCommunicator(PlainCommunicator):
    """Calls `on_mean` with the model before each mean of gradients, also where it was split."""

    def __init__(self, mpi, on_mean: Callable[[Any], None] = lambda model: None):
        super().__init__(mpi)
        self.on_mean = on_mean

    def split(self, color, key):
        return WatchedCommunicator(
            self.mpi.Split(color, key), lambda model: self.on_mean(model)
        )

    def multi_node_mean_grad(self, model, zero_fill=False):
        self.on_mean(model)
        super().multi_node_mean_grad(model, zero_fill)
