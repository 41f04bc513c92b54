"""What can't be done on GPUs is told on every rank: disagreement, devices, a missing NCCL."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from chainermn_comm import RankMismatchError, create_communicator
from tests.support.doubles import gpus
from tests.support.doubles.gpus import NCCL, assert_mean, have_one_each, put
from tests.support.oracles.raised import raises_on_all
from tests.support.worlds.models import Model, Param
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]


def call_alltoall(comm, x):
    return comm.alltoall([x] * comm.size)


def call_reduce_scatter(comm, x):
    return comm.reduce_scatter([x] * comm.size)


def call_bcast_data(comm, x):
    return comm.bcast_data(Model(w=Param(x)))


def call_allreduce_grad(comm, x):
    return comm.allreduce_grad(Model(w=Param(x, x)))


# Calls of all ranks with an array.
CALLS = {
    "gather": lambda comm, x: comm.gather(x),
    "allgather": lambda comm, x: comm.allgather(x),
    "alltoall": call_alltoall,
    "allreduce": lambda comm, x: comm.allreduce(x),
    "reduce_scatter": call_reduce_scatter,
    "multi_node_mean": lambda comm, x: comm.multi_node_mean(x),
    "bcast_data": call_bcast_data,
    "allreduce_grad": call_allreduce_grad,
}


@pytest.mark.parametrize("name", ["naive", "hierarchical"])
@pytest.mark.parametrize("verb", CALLS)
def test_arrays_here_on_gpus_and_there_on_the_host_are_told(
    world, one_each, verb, name
):
    host = np.ones(3, "f4")
    told = r"disagree on arrays: in host memory on rank 0; on a GPU on rank"
    if verb == "allreduce_grad":
        told = r"/w float32 \(3,\) on rank 0; .*/w float32 \(3,\) on a GPU on rank"
    with create_communicator(name) as comm:
        array = host
        if comm.rank:
            array = put(host)
        with pytest.raises(RankMismatchError, match=told):
            CALLS[verb](comm, array)
        CALLS[verb](comm, put(host))
        assert_mean(comm)


def test_a_rank_without_arrays_takes_part_wherever_the_others_have_theirs(
    world, one_each
):
    one = np.ones(3, "f4")
    with create_communicator("hierarchical") as comm:
        is_first = comm.rank == 0
        given = ()
        if is_first:
            given = put(one)
        found = comm.allgather(given)
        assert [gpus.on_gpu(each) for each in found[:1]] == [True]
        assert found[1] == ()
        for call, given in (
            (comm.bcast, put(one)),
            (comm.scatter, [put(one)] * comm.size),
        ):
            array = None
            if is_first:
                array = given
            assert gpus.on_gpu(call(array))


def test_pure_nccl_refuses_numpy_gradients(world, one_each):
    with create_communicator("pure_nccl") as comm:
        with pytest.raises(
            ValueError, match=r"pure_nccl.*NumPy arrays.*to_gpu.*hierarchical"
        ):
            comm.allreduce_grad(Model(w=Param(np.ones(2), np.ones(2))))
        assert_mean(comm)


@pytest.mark.parametrize("name", ["naive", "hierarchical"])
def test_a_model_in_both_memories_is_refused_on_all_ranks(world, one_each, name):
    there = put(np.ones(3, "f4"))
    here = there
    is_odd = world.rank == 1
    if is_odd:
        here = np.ones(3, "f4")
    with create_communicator(name) as comm:
        model = Model(v=Param(there, there), w=Param(here, here))
        with raises_on_all(is_odd, TypeError, r"rank 1.*some .* on a GPU and .*to_gpu"):
            comm.allreduce_grad(model)
        assert_mean(comm)


@pytest.mark.parametrize("name", ["pure_nccl", "hierarchical"])
def test_ranks_on_one_device_are_told_and_others_serve(world, gpu, name):
    told = r"ranks \[0, 1.* use device .*get_device_from"
    with create_communicator(name) as comm:
        with gpus.on_one_device(gpu), create_communicator("flat") as other:
            for call in (assert_mean, lambda comm: comm.bcast(put(np.ones(2)))):
                with pytest.raises(ValueError, match=told):
                    call(comm)
            assert_mean(other)
        if have_one_each(world):
            assert_mean(comm)


@pytest.mark.parametrize("name", ["pure_nccl", "flat"])
def test_one_rank_on_another_device_than_before_raises_on_all(world, double, name):
    import cupy

    double.count = 2
    is_odd = world.rank == 0
    told = r"lies on device \d.*first used on device \d"
    with create_communicator(name) as comm:
        assert_mean(comm)
        with (
            cupy.cuda.Device(int(is_odd)),
            raises_on_all(is_odd, ValueError, told),
        ):
            assert_mean(comm)
        assert_mean(comm)


WHY_NOT = {
    "no device": ("count", 0),
    "InsufficientDriver": ("count", -1),
    "pip install nvidia-nccl-cu12": ("available", False),
}


@pytest.mark.parametrize("why", WHY_NOT)
def test_a_rank_without_nccl_is_told_on_all_ranks(world, double, monkeypatch, why):
    """When `pure_nccl` is made; by other names once arrays on GPUs come. Nothing is copied."""
    from cupy.cuda import nccl

    odd = world.rank == world.size - 1
    what, value = WHY_NOT[why]
    array = put(np.ones(3, "f4"))
    with create_communicator("hierarchical") as comm:
        if odd:
            owner = nccl
            if what in vars(double):
                owner = double
            monkeypatch.setattr(owner, what, value)
        for call in (assert_mean, lambda comm: comm.allreduce(array)):
            with raises_on_all(odd, RuntimeError, f"{why}.*'flat' needs no NCCL"):
                call(comm)
        with raises_on_all(odd, ValueError, f"{why}.*on CPUs use one of: flat"):
            create_communicator("pure_nccl")
        monkeypatch.undo()
        double.count = 1
        assert_mean(comm)


@pytest.mark.parametrize(
    ("name", "inits"),
    [("hierarchical", 1), ("non_cuda_aware", 0), ("flat", 0), ("pure_nccl", 1)],
)
def test_one_gpu_a_node_needs_nccl_between_nodes_alone(world, double, name, inits):
    double.bus_id = "0000:17:00.0"  # on each node
    with on_nodes(range(world.size), name) as comm:
        assert_mean(comm)
    assert double.made.count("commInitRank") == inits


@pytest.mark.sizes(1)
@pytest.mark.parametrize("name", NCCL)
def test_a_single_rank_needs_no_nccl(world, double, monkeypatch, name):
    from cupy.cuda import nccl

    with create_communicator(name) as comm:
        monkeypatch.setattr(nccl, "available", False)
        arrays = [np.arange(5, dtype="f4"), np.ones(3, "f8")]
        means = gpus.means_of(comm, arrays)
        found = set(gpus.to_host(comm.allreduce(put(np.ones(2)))))
        assert found == {1.0}
    assert_array_equal(means[0], np.arange(5))
    assert "commInitRank" not in double.made
