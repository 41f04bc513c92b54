"""The communicators that the wrappers are tested with, a third party's among them."""

from __future__ import annotations

import numpy as np
import pytest
from chainer import using_config
from chainer.optimizers import SGD

from chainermn_comm import create_communicator
from chainermn_train import create_multi_node_optimizer
from tests.support.training.small_models import ScaledMean
from tests.support.training.trainers import all_compared as all_compared
from tests.support.training.trainers import trainer_over
from tests.support.worlds.third_party import PlainCommunicator
from tests.support.worlds.topologies import on_nodes

SIX = np.arange(6, dtype=np.float32)


def make(name, world):
    if name == "plain":
        return PlainCommunicator(world.Dup())
    return create_communicator(name, world)


# The first tier has the default communicator, the second a third party's on 3 ranks,
# and the full tier all on all sizes.
COMMUNICATORS = [
    "hierarchical",
    pytest.param("plain", marks=[pytest.mark.ranks(3), pytest.mark.ci]),
    pytest.param("naive", marks=pytest.mark.full),
]
# Names, and imposed nodes. Memory that ranks share is tested on 2 and 3 ranks, and
# messages on 3.
EVERY = [
    *COMMUNICATORS,
    pytest.param("hierarchical on 0 1 0 1", marks=pytest.mark.ranks(3)),
    *(
        pytest.param(name, marks=pytest.mark.full)
        for name in (
            *("flat", "two_dimensional", "single_node", "non_cuda_aware"),
            "two_dimensional on 0 0 1 1",
        )
    ),
]


@pytest.fixture(scope="session", params=COMMUNICATORS)
def comm(request):
    """Each communicator that the wrappers must work with."""
    from mpi4py import MPI

    return make(request.param, MPI.COMM_WORLD)


@pytest.fixture(scope="module", params=EVERY)
def every(request):
    """Each communicator that runs on CPUs, some with nodes imposed."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    name, _, nodes = request.param.partition(" on ")
    if nodes:
        comm = on_nodes(nodes.split()[: world.size], name)
    else:
        comm = make(name, world)
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


@pytest.fixture(scope="module")
def play(request):
    """Lets all ranks execute commands to optimizers, and judges what comes of them."""
    from mpi4py import MPI

    from tests.train.optimizer_machine.play import Play

    plugin = request.config.pluginmanager.getplugin("chainermn-world")
    return Play(MPI.COMM_WORLD, plugin.stderr)


@pytest.fixture
def trainer_for(tmp_path):
    """Makes a trainer over ranks, with SGD and batches of two in order: three are an epoch."""

    def make(comm, stop, *extensions, model=None, examples=SIX):
        optimizer = create_multi_node_optimizer(SGD(lr=0.01), comm)
        trainer = trainer_over(
            examples, 2, optimizer.setup(model or ScaledMean()), stop, tmp_path
        )
        for extension in extensions:
            trainer.extend(extension)
        return trainer

    return make


@pytest.fixture
def double_precision():
    """New parameters are float64."""
    with using_config("dtype", np.dtype("float64")):
        yield


@pytest.fixture
def folder(tmp_path, world):
    """One folder for all ranks."""
    return world.bcast(tmp_path)


@pytest.fixture
def unsynced(monkeypatch):
    """Files need not reach the disk."""
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.fixture(scope="module")
def forkserver():
    """Workers that are not forked, whatever other tests have started processes by."""
    import multiprocessing

    from chainermn_train import use_forkserver

    multiprocessing.set_start_method(None, force=True)
    use_forkserver()
    yield
    multiprocessing.set_start_method(None, force=True)
