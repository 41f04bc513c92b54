"""Arrays on GPUs and parameters there, beside those on hosts; those that pass through buffers."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from chainermn_comm import create_communicator
from tests.support.doubles import gpus
from tests.support.doubles.gpus import put_sample as on_gpu
from tests.support.oracles.samples import DTYPES, same, sample
from tests.support.oracles.verbs import check_array
from tests.support.worlds.models import Model, Param

pytestmark = pytest.mark.world
check = partial(check_array, is_there=True)


@pytest.fixture(params=["naive", "hierarchical"])
def comm(gpu, request):
    """A communicator whose arrays pass through host memory, and one where NCCL can take them.

    It can't where ranks share a device.
    """
    with create_communicator(request.param) as communicator:
        yield communicator


@pytest.mark.sizes(2, 3, 4)
def test_one_value_may_have_arrays_here_and_there(comm):
    if comm.rank == 0:
        comm.send((on_gpu(0), sample(0, "int8"), 3), dest=1)
    elif comm.rank == 1:
        there, here, scalar = comm.recv(source=0)
        check(there, sample(0, "float32"))
        same(here, sample(0, "int8"))
        assert scalar == 3


def test_a_mean_may_not_go_to_an_array_on_the_other_side(comm):
    with pytest.raises(ValueError, match="in the same kind of memory"):
        comm.multi_node_mean(on_gpu(comm.rank), np.zeros((4, 6), "f4"))


def test_a_model_may_have_parameters_here_and_there(comm):
    there = on_gpu(comm.rank)
    here = sample(comm.rank, "float64").copy()
    comm.bcast_data(Model(a=Param(there), b=Param(here)))
    check(there, sample(0, "float32"))
    same(here, sample(0, "float64"))


def test_arrays_are_sent_as_the_current_stream_leaves_them(comm):
    import cupy

    array = gpus.put(np.zeros(50_000, "f4"))
    host = gpus.pinned(200_000)
    host.view("f4")[:] = comm.rank + 1
    with cupy.cuda.Stream(non_blocking=True) as stream:
        gpus.copy_to_device(host, array, stream)  # later
        found = comm.allgather(array)
        comm.bcast_data(Model(w=Param(array)))
        for rank, other in enumerate(found):
            check(other, np.full(50_000, rank + 1, "f4"))
        check(array, np.full(50_000, 1, "f4"))


def test_many_arrays_take_one_wait_each_way(world, double):
    """And one page-locked buffer, whatever their number."""
    with create_communicator("naive") as comm:
        many = [on_gpu(comm.rank, dtype) for dtype in DTYPES * 3]
        double.made.clear()
        comm.allgather(many)
        assert double.made.count("eventRecord") == 2
        assert double.made.count("hostAlloc") == 2
        with gpus.small_buffers():
            double.made.clear()
            comm.allgather(gpus.put(np.zeros(10_000)))
            assert double.made.count("hostAlloc") == 4
        assert not double.pinned
