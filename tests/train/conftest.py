"""The communicators that the wrappers are tested with, a stranger's among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chainer
import pytest
from chainer import training

from chainermn_comm import CommunicatorBase, create_communicator
from chainermn_train import create_multi_node_optimizer, durable
from tests.support.third_party import PlainCommunicator
from tests.support.topologies import on_nodes


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
        comm = on_nodes(nodes[: world.size], request.param.split()[0])
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
