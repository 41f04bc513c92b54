"""A communicator's methods for objects."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from .table import case, each, of_rank_0

OBJECTS = {
    "none": None,
    "int": 3,
    "text": "text",
    "bytes": b"bytes",
    "dict": {"a": [1, (2, 3)]},
    "array": np.arange(3, dtype=np.float32),
    "numpy scalar": np.float64(2.5),
}


@each(**OBJECTS)
def send_obj(chainermn, comm, value):
    if comm.rank == 0:
        return comm.send_obj(value, 1, 3)
    return comm.recv_obj(0, tag=3)


@case
def recv_obj_with_a_positional_tag(chainermn, comm):
    """As 1.3's manual says; Chainer 7's took it for a status."""
    if comm.rank == 0:
        return comm.send_obj("text", 1, 3)
    return comm.recv_obj(0, 3)


@case
def recv_obj_with_a_status(chainermn, comm):
    if comm.rank == 0:
        return comm.send_obj("text", 1, 4)
    status = MPI.Status()
    return comm.recv_obj(0, status=status, tag=4), status.Get_source(), status.Get_tag()


@case
def recv_obj_of_any_source(chainermn, comm):
    if comm.rank == 0:
        return comm.send_obj("text", 1, 4)
    return comm.recv_obj(MPI.ANY_SOURCE, tag=4)


@each(**OBJECTS)
def bcast_obj(chainermn, comm, value):
    return comm.bcast_obj(of_rank_0(comm, value))


@case
def bcast_obj_where_others_have_one(chainermn, comm):
    return comm.bcast_obj(f"of {comm.rank}")


@each(1, 1024, None)
def bcast_obj_with_max_buf_len(chainermn, comm, length):
    return comm.bcast_obj(of_rank_0(comm, list(range(100))), max_buf_len=length)


@case
def bcast_obj_gives_the_root_its_own(chainermn, comm):
    if comm.rank:
        mine = None
    else:
        mine = [1]
    return comm.bcast_obj(mine) is mine


@each(**OBJECTS)
def gather_obj(chainermn, comm, value):
    return comm.gather_obj(value)


@each(
    ints=(1, 2),
    floats=(0.25, 0.5),
    texts=("a", "b"),
    lists=([1], [2]),
    arrays=(np.ones(2, np.float32), np.ones(2, np.float32)),
    bools=(True, False),
)
def allreduce_obj(chainermn, comm, values):
    return comm.allreduce_obj(values[comm.rank])


@case
def allreduce_obj_of_dicts(chainermn, comm):
    return comm.allreduce_obj({"a": 1})
