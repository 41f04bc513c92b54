"""The interface: what a subclass must write, and what it gets in return."""

from __future__ import annotations

from copy import copy, deepcopy

import numpy as np
import pytest
from mpi4py import MPI
from numpy.testing import assert_array_equal

from chainermn_comm import CommunicatorBase
from tests.support.worlds.models import Model, Param
from tests.support.worlds.third_party import PlainCommunicator

REQUIRED = {
    *("rank", "size", "intra_rank", "inter_rank", "inter_size", "split"),
    *("send", "recv", "bcast", "gather", "alltoall", "allreduce"),
    *("send_obj", "recv_obj", "bcast_obj", "gather_obj", "allreduce_obj"),
    *("bcast_data", "allreduce_grad"),
}


class Alone(PlainCommunicator):
    """One rank, and only what the interface asks for."""

    def __init__(self):
        super().__init__(MPI.COMM_SELF)

    def allreduce(self, data):
        return data


def test_the_abstract_members_are_those_of_the_specification():
    """But for `split`, which programs' own communicators may lack."""
    assert CommunicatorBase.__abstractmethods__ == REQUIRED - {"split"}


@pytest.mark.parametrize("duplicate", [copy, deepcopy])
def test_copies_of_what_holds_a_communicator_share_it(duplicate):
    comm = Alone()
    assert duplicate({"comm": comm, "list": []})["comm"] is comm
    assert duplicate(comm) is comm


def test_the_other_methods_come_with_the_interface():
    """Those that move data are in test_inherited_methods.py."""
    comm = Alone()
    assert comm.intra_size == 1
    with pytest.raises(TypeError, match="1 values, one for each rank"):
        comm.scatter(None)
    found = comm.scatter(np.array([[1, 2]])).tolist()
    assert found == [1, 2]
    assert comm.allgather_obj("x") == ["x"]
    assert comm.scatter_obj(["y"]) == "y"
    assert comm.alltoall_obj(["z"]) == ["z"]
    model = Model(w=Param(np.ones(3)))
    comm.multi_node_mean_grad(model, zero_fill=True)
    assert_array_equal(model["w"].grad, np.zeros(3))
    assert comm.get_config() == {}
    with pytest.raises(ValueError, match="no setting"):
        comm.set_config("batched_copy")
    with pytest.raises(AttributeError, match="not built on mpi4py"):
        _ = comm.mpi_comm
    with comm as same:
        assert same is comm
