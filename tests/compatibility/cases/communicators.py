"""A communicator's methods for arrays, and its ranks."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from .table import case, each, of_rank_0, outcome

ARRAYS = {
    "float16": np.arange(3, dtype=np.float16),
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "float64": np.arange(3, dtype=np.float64),
    "int8": np.arange(3, dtype=np.int8),
    "int32": np.arange(3, dtype=np.int32),
    "int64": np.arange(3, dtype=np.int64),
    "uint8": np.arange(3, dtype=np.uint8),
    "bool": np.array([True, False]),
    "0-d": np.array(3.0, np.float32),
    "empty": np.zeros((0, 2), np.float32),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
}
SCALARS = {
    "int": 3,
    "float": 2.5,
    "float32": np.float32(1.5),
    "int64": np.int64(7),
}

BY_KEYWORD = ("bcast", "gather", "allreduce")


@case
def ranks(chainermn, comm):
    return {
        name: getattr(comm, name)
        for name in [
            "rank",
            "size",
            "intra_rank",
            "intra_size",
            "inter_rank",
            "inter_size",
        ]
    }


@each("rank", "size", "intra_rank")
def ranks_are_read_only(chainermn, comm, name):
    setattr(comm, name, 1)


@case
def mpi_comm(chainermn, comm):
    return comm.mpi_comm.rank, comm.mpi_comm.size, comm.mpi_comm.allreduce(comm.rank)


# -- of one rank to another


def exchange(comm, value):
    """What rank 1 receives of rank 0."""
    if comm.rank == 0:
        return comm.send(value, 1, 5)
    return comm.recv(0, 5)


@each(**ARRAYS)
def send_an_array(chainermn, comm, array):
    return exchange(comm, array)


@each(**SCALARS)
def send_a_scalar(chainermn, comm, value):
    return exchange(comm, value)


@each(
    two=(np.zeros(2, np.float32), np.ones((1, 2), np.float32)),
    one=(np.ones(2, np.float32),),
    dtypes=(np.zeros(2, np.float32), np.ones(2, np.int32)),
)
def send_a_tuple(chainermn, comm, arrays):
    return exchange(comm, arrays)


@case
def send_a_tuple_of_scalars(chainermn, comm):
    return exchange(comm, (1.0, 2.0))


@each(source=(MPI.ANY_SOURCE, 5), tag=(0, MPI.ANY_TAG))
def recv_of_any(chainermn, comm, place):
    if comm.rank == 0:
        return comm.send(np.ones(2, np.float32), 1, 5)
    return comm.recv(*place)


@each("text", b"bytes", None, [1, 2])
def send_what_is_no_array(chainermn, comm, value):
    if comm.rank == 0:
        return comm.send(value, 1, 0)
    return None  # nothing may come


# -- of one to all, and of all to one


@each(**ARRAYS)
def bcast_an_array(chainermn, comm, array):
    return comm.bcast(of_rank_0(comm, array))


@each(**SCALARS)
def bcast_a_scalar(chainermn, comm, value):
    return comm.bcast(of_rank_0(comm, value))


@case
def bcast_where_others_have_an_array(chainermn, comm):
    mine = np.full(3, comm.rank, np.float32)
    return comm.bcast(mine), mine


@case
def bcast_gives_the_root_its_own_array(chainermn, comm):
    mine = np.full(3, comm.rank, np.float32)
    return comm.bcast(mine) is mine


@case
def bcast_with_max_buf_len(chainermn, comm):
    return comm.bcast(np.full(2, comm.rank, np.float32), max_buf_len=1024, root=1)


@case
def bcast_with_a_positional_root(chainermn, comm):
    return comm.bcast(np.full(2, comm.rank, np.float32), 1)


@each(*[f"{verb} {name}" for verb in BY_KEYWORD for name in ("x", "data")])
def by_keyword(chainermn, comm, call):
    verb, name = call.split()
    return getattr(comm, verb)(**{name: np.full(2, comm.rank, np.float32)})


@case
def bcast_a_tuple(chainermn, comm):
    arrays = (np.zeros(2, np.float32), np.ones(1, np.float32))
    return comm.bcast(of_rank_0(comm, arrays))


@each(**ARRAYS)
def gather_arrays(chainermn, comm, array):
    return comm.gather(array)


@each(**SCALARS)
def gather_scalars(chainermn, comm, value):
    return comm.gather(value)


@case
def gather_tuples(chainermn, comm):
    return comm.gather((np.zeros(2, np.float32), np.ones(1, np.float32)))


@each(tuple=tuple, list=list, array=np.array)
def scatter(chainermn, comm, kind):
    parts = kind([np.full(2, n, np.float32) for n in range(2)])
    return comm.scatter(of_rank_0(comm, parts))


@case
def scatter_scalars(chainermn, comm):
    return comm.scatter(of_rank_0(comm, (1.5, 2.5)))


@each(**ARRAYS)
def scatter_an_array_each(chainermn, comm, array):
    return comm.scatter(of_rank_0(comm, (array, array)))


# -- of all to all


@each(**ARRAYS)
def allgather_arrays(chainermn, comm, array):
    return comm.allgather(array)


@each(**SCALARS)
def allgather_scalars(chainermn, comm, value):
    return comm.allgather(value)


@each(**ARRAYS)
def alltoall_an_array_each(chainermn, comm, array):
    return comm.alltoall((array, array))


@each(tuple=tuple, list=list, array=np.array)
def alltoall(chainermn, comm, kind):
    return comm.alltoall(
        kind([np.full(2, 10 * comm.rank + n, np.float32) for n in range(2)])
    )


@case
def alltoall_of_scalars(chainermn, comm):
    return comm.alltoall((1.0, 2.0))


@each(**ARRAYS)
def allreduce_arrays(chainermn, comm, array):
    return comm.allreduce(array)


@each(**SCALARS)
def allreduce_scalars(chainermn, comm, value):
    return comm.allreduce(value)


@case
def allreduce_of_a_tuple(chainermn, comm):
    return comm.allreduce((np.zeros(2, np.float32), np.ones(1, np.float32)))


@case
def allreduce_of_a_list(chainermn, comm):
    return comm.allreduce([1.0, 2.0])


@case
def results_can_be_written_to(chainermn, comm):
    mine = np.full(2, comm.rank, np.float32)
    results = {
        "bcast": comm.bcast(mine),
        "allgather": comm.allgather(mine)[1],
        "alltoall": comm.alltoall((mine, mine))[1],
        "allreduce": comm.allreduce(mine),
        "scatter": comm.scatter(of_rank_0(comm, (mine, mine))),
    }
    return {
        name: outcome(lambda array=array: array.fill(1))
        for name, array in results.items()
    }
