"""A communicator's making, settings, division and end, and its methods for models."""

from __future__ import annotations

import numpy as np
from chainer import Chain
from chainer.links import BatchNormalization, Linear
from mpi4py import MPI

from .models import backward, grads, linear, state
from .table import case, each, outcome

NAMES = ["naive", "flat", "dummy", "non_cuda_aware", "pure_nccl"]
FORMER = ["hierarchical", "two_dimensional", "single_node"]  # of 1.3


@each(*NAMES, *FORMER, "unknown", "Naive")
def create_communicator(chainermn, comm, name):
    made = chainermn.create_communicator(name, MPI.COMM_WORLD.Dup())
    return made.rank, made.size, isinstance(made, chainermn.CommunicatorBase)


@case
def create_communicator_without_arguments(chainermn, comm):
    return chainermn.create_communicator().size


@case
def create_communicator_of_some_ranks(chainermn, comm):
    made = chainermn.create_communicator("naive", MPI.COMM_SELF.Dup())
    return made.rank, made.size, made.intra_size, made.inter_size, made.allreduce_obj(3)


@each("naive", "pure_nccl")
def allreduce_grad_dtype(chainermn, comm, name):
    made = chainermn.create_communicator(
        name, MPI.COMM_WORLD.Dup(), allreduce_grad_dtype=np.float16
    )
    return made.get_config("allreduce_grad_dtype")


@each("naive", "pure_nccl")
def batched_copy(chainermn, comm, name):
    made = chainermn.create_communicator(name, MPI.COMM_WORLD.Dup(), batched_copy=True)
    return made.get_config("batched_copy")


@case
def create_communicator_with_an_unknown_keyword(chainermn, comm):
    return chainermn.create_communicator("naive", MPI.COMM_WORLD.Dup(), unknown=1).size


# -- settings


@case
def get_config(chainermn, comm):
    return comm.get_config()


@each("allreduce_grad_dtype", "batched_copy", "unknown")
def get_config_of(chainermn, comm, name):
    return comm.get_config(name)


@each(
    dtype=("allreduce_grad_dtype", np.float16),
    text=("allreduce_grad_dtype", "float16"),
    none=("allreduce_grad_dtype", None),
    batched=("batched_copy", True),
    unknown=("unknown", 1),
)
def set_config(chainermn, comm, given):
    name, value = given
    return comm.set_config(name, value), comm.get_config(name)


@case
def batched_copy_attribute(chainermn, comm):
    return comm.batched_copy


@case
def set_config_without_a_value(chainermn, comm):
    return comm.set_config("batched_copy"), comm.get_config("batched_copy")


@case
def within_config_scope(chainermn, comm):
    before = comm.within_config_scope
    with comm.config_scope():
        within = comm.within_config_scope
    return before, within, comm.within_config_scope


@case
def config_scope(chainermn, comm):
    with comm.config_scope():
        comm.batched_copy = True
        comm.of_nobody = 3
    return outcome(lambda: comm.get_config("batched_copy")), outcome(
        lambda: comm.batched_copy
    )


@case
def config_scope_gives(chainermn, comm):
    with comm.config_scope() as scope:
        return scope is comm, scope


@case
def attributes_outside_of_a_config_scope(chainermn, comm):
    comm.own = 3
    return comm.own


# -- division and end


@case
def split_into_one(chainermn, comm):
    part = comm.split(0, -comm.rank)
    return (
        part.rank,
        part.size,
        part.intra_rank,
        part.inter_rank,
        part.gather_obj(comm.rank),
    )


@case
def use_after_finalize(chainermn, comm):
    comm.finalize()
    return comm.allreduce_obj(1)


@case
def derived_of_the_base(chainermn, comm):
    """As a script might that wants a communicator of its own."""

    class Own(chainermn.CommunicatorBase):
        rank = property(lambda self: 5)

    return sorted(Own.__abstractmethods__)


# -- models


@each("bcast_data", "broadcast_data")
def parameters(chainermn, comm, method):
    model = linear(comm.rank + 1.0)
    return getattr(comm, method)(model), state(model)


@case
def bcast_data_of_persistents(chainermn, comm):
    model = BatchNormalization(2)
    model.avg_mean += comm.rank + 1
    model.N += comm.rank + 1
    comm.bcast_data(model)
    return state(model)


@case
def bcast_data_of_parameters_without_data(chainermn, comm):
    model = Chain(a=Linear(None, 2), b=linear(comm.rank))
    comm.bcast_data(model)
    return state(model)


@case
def bcast_data_writes_into_the_arrays(chainermn, comm):
    model = linear(comm.rank + 1.0)
    array = model.W.array
    comm.bcast_data(model)
    return array is model.W.array, array


@each("allreduce_grad", "multi_node_mean_grad")
def means(chainermn, comm, method):
    model = linear()
    backward(model, comm.rank)
    return getattr(comm, method)(model), grads(model)


@each("naive", "flat", "dummy")
def means_by(chainermn, comm, name):
    made = chainermn.create_communicator(name, MPI.COMM_WORLD.Dup())
    model = linear()
    backward(model, comm.rank)
    made.multi_node_mean_grad(model)
    return grads(model)


@each(np.float16, np.float32, np.float64)
def means_of_dtype(chainermn, comm, dtype):
    model = linear(dtype=dtype)
    for param in model.params():
        param.grad = np.full_like(param.array, comm.rank + 0.5)
    comm.multi_node_mean_grad(model)
    return grads(model)


@each("naive", "flat")
def means_of_mixed_dtypes(chainermn, comm, name):
    made = chainermn.create_communicator(name, MPI.COMM_WORLD.Dup())
    model = Chain(a=linear(dtype=np.float32), b=linear(dtype=np.float64))
    for param in model.params():
        param.grad = np.full_like(param.array, comm.rank + 0.5)
    made.multi_node_mean_grad(model)
    return grads(model)


@each(False, True)
def means_where_no_rank_has_a_gradient(chainermn, comm, zero_fill):
    model = linear()
    model.cleargrads()
    model.W.grad = np.full((2, 3), comm.rank, np.float32)
    comm.multi_node_mean_grad(model, zero_fill=zero_fill)
    return grads(model)


@each("allreduce_grad", "multi_node_mean_grad")
def means_where_one_rank_has_a_gradient(chainermn, comm, method):
    model = linear()
    model.cleargrads()
    model.W.grad = np.full((2, 3), comm.rank + 1, np.float32)
    if comm.rank == 0:
        model.b.grad = np.full(2, 3, np.float32)
    getattr(comm, method)(model, zero_fill=True)
    return grads(model)


@case
def means_of_uninitialized_parameters(chainermn, comm):
    model = Chain(a=Linear(None, 2), b=linear())
    model.cleargrads()
    backward(model.b, comm.rank)
    comm.multi_node_mean_grad(model, True)
    return grads(model)


@case
def means_write_into_the_arrays(chainermn, comm):
    model = linear()
    backward(model, comm.rank)
    array = model.W.grad
    comm.multi_node_mean_grad(model)
    return array is model.W.grad
