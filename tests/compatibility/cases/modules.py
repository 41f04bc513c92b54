"""Modules: the hook, NCCL, the helper of tests, and what old scripts import by its path."""

from __future__ import annotations

import importlib
import sys

import chainer
from mpi4py import MPI

from .table import case, each

PATHS = {
    "CommunicatorBase": "chainermn.communicators.communicator_base",
    "DummyCommunicator": "chainermn.communicators.dummy_communicator",
    "NaiveCommunicator": "chainermn.communicators.naive_communicator",
    "FlatCommunicator": "chainermn.communicators.flat_communicator",
    "MpiCommunicatorBase": "chainermn.communicators.mpi_communicator_base",
    "NonCudaAwareCommunicator": "chainermn.communicators.non_cuda_aware_communicator",
    "PureNcclCommunicator": "chainermn.communicators.pure_nccl_communicator",
}


@each(*PATHS)
def communicator_is_a(chainermn, comm, name):
    return isinstance(comm, getattr(importlib.import_module(PATHS[name]), name))


@each(*[name for name in PATHS if "Base" not in name])
def made_by_its_class(chainermn, comm, name):
    made = getattr(importlib.import_module(PATHS[name]), name)(MPI.COMM_WORLD.Dup())
    return made.rank, made.size, made.allreduce_obj(1)


@case
def add_hook(chainermn, comm):
    import chainermn.global_except_hook

    before = sys.excepthook
    result = chainermn.global_except_hook.add_hook()
    sys.excepthook = before
    return result


@case
def nccl_names(chainermn, comm):
    module = importlib.import_module("chainermn.nccl")
    return [name for name in dir(module) if not name.startswith("_")]


@each(none=(), number=(0,))
def get_device(chainermn, comm, arguments):
    device = importlib.import_module("chainermn.testing").get_device(*arguments)
    return (
        type(device).__name__,
        str(device),
        isinstance(device, chainer.backend.Device),
    )


@case
def version(chainermn, comm):
    return type(chainermn.__version__).__name__


@each(
    "chainermn.communicators",
    "chainermn.datasets",
    "chainermn.extensions",
    "chainermn.functions",
    "chainermn.global_except_hook",
    "chainermn.iterators",
    "chainermn.links",
    "chainermn.optimizers",
)
def module_is_an_attribute(chainermn, comm, path):
    """Of what `import chainermn` alone gives."""
    return getattr(chainermn, path.partition(".")[2]).__name__
