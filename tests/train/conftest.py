"""The communicators that the wrappers are tested with, a stranger's among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chainer
import numpy as np
import pytest
from chainer import training

from chainermn_comm import CommunicatorBase, create_communicator
from chainermn_comm.catalogue import make_communicator
from chainermn_comm.topology import Topology
from chainermn_train import create_multi_node_optimizer, durable


class PlainCommunicator(CommunicatorBase):
    """A third party's communicator: nothing but the abstract members, over mpi4py's pickles.

    Its `bcast_data` is the simplest that can be: it knows nothing of lazy initialisation.
    """

    rank = property(lambda self: self.mpi.rank)
    size = property(lambda self: self.mpi.size)
    intra_rank = rank
    inter_rank = property(lambda self: 0)
    inter_size = property(lambda self: 1)

    def __init__(self, mpi: Any) -> None:
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

    def allreduce(self, data):
        return sum(self.mpi.allgather(data))

    send_obj, recv_obj, bcast_obj, gather_obj = send, recv, bcast, gather
    allreduce_obj = allreduce

    def bcast_data(self, model):
        for _, param in sorted(model.namedparams()):
            if param.data is not None:
                param.data[...] = self.mpi.bcast(param.data)

    def allreduce_grad(self, model):
        for _, param in sorted(model.namedparams()):
            if param.grad is not None:
                param.grad = np.asarray(self.allreduce(param.grad) / self.size, param.grad.dtype)


def make(name: str, world: Any) -> CommunicatorBase:
    return PlainCommunicator(world.Dup()) if name == "plain" else create_communicator(name, world)


@pytest.fixture(scope="session", params=["naive", "hierarchical", "plain"])
def comm(request):
    """Each communicator that the wrappers must work with."""
    from mpi4py import MPI

    return make(request.param, MPI.COMM_WORLD)


# All that run on CPUs, some with nodes imposed.
WORLDS = {
    "naive": None,
    "flat": None,
    "hierarchical": None,
    "two_dimensional": None,
    "single_node": None,
    "non_cuda_aware": None,
    "plain": None,
    "hierarchical on nodes": (0, 1, 0, 1),
    "two_dimensional on nodes": (0, 0, 1, 1),
}


@pytest.fixture(scope="module", params=WORLDS)
def every(request):
    """Each communicator, some with nodes imposed."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    nodes = WORLDS[request.param]
    if nodes is None:
        comm = make(request.param, world)
    else:
        topology = Topology.of(nodes[: world.size])
        comm = make_communicator(request.param.split()[0], topology=topology)
    yield comm
    comm.finalize()


@pytest.fixture(scope="session")
def naive():
    """A communicator, where any will do."""
    from mpi4py import MPI

    return make("naive", MPI.COMM_WORLD)


@pytest.fixture(scope="session")
def plain_communicator():
    """The third party's class."""
    return PlainCommunicator


@pytest.fixture
def trainer_for(tmp_path):
    """Makes a trainer of a model over ranks, with SGD and batches of two in order."""

    def make(comm, model, examples, stop_trigger, batch=2):
        optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(lr=0.01), comm)
        iterator = chainer.iterators.SerialIterator(examples, batch, shuffle=False)
        updater = training.StandardUpdater(iterator, optimizer.setup(model))
        return training.Trainer(updater, stop_trigger, out=str(tmp_path))

    return make


@pytest.fixture
def folder(tmp_path, world) -> Path:
    """One folder for all ranks."""
    return world.bcast(tmp_path)


@pytest.fixture
def unsynced(monkeypatch):
    """Files need not reach the disk."""
    monkeypatch.setattr(durable.os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def forkserver():
    """Workers that are not forked, whatever other tests have started processes by."""
    import multiprocessing

    from chainermn_train import use_forkserver

    multiprocessing.set_start_method(None, force=True)
    use_forkserver()
    yield
    multiprocessing.set_start_method(None, force=True)
