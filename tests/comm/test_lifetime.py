"""How communicators are made, divided, set up and released."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref

import numpy as np
import pytest

import chainermn_comm
from chainermn_comm import (
    FinalizedError,
    PeerError,
    RankMismatchError,
    Topology,
    create_communicator,
)
from tests.support.models import Model, Param, check_mean, with_grads
from tests.support.topologies import IMPOSED, WAYS, by_name, on_nodes, over_nodes, reducer_of

pytestmark = pytest.mark.world


def test_ranks_and_sizes(comm, world):
    assert (comm.rank, comm.size) == (world.rank, world.size)
    # All ranks of these tests run on one machine.
    assert (comm.intra_rank, comm.intra_size) == (world.rank, world.size)
    assert (comm.inter_rank, comm.inter_size) == (0, 1)


def test_imposed_topologies(world):
    for nodes in IMPOSED[world.size]:
        with on_nodes(nodes, "naive") as comm:
            assert comm.inter_rank == nodes[world.rank]
            assert comm.inter_size == len(set(nodes))
            assert comm.intra_size == nodes.count(nodes[world.rank])
            assert comm.intra_rank == nodes[: world.rank].count(nodes[world.rank])


def test_the_default_works_without_gpus_and_without_a_warning(world):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comm = create_communicator()
    check_mean(comm)
    comm.finalize()


def test_pure_nccl_says_why_not_and_what_instead():
    with pytest.raises(
        ValueError, match=r"'pure_nccl' is for GPUs.*on CPUs use one of: dummy, flat"
    ):
        create_communicator("pure_nccl")


def test_single_node_refuses_several_nodes(world):
    for nodes in IMPOSED[world.size]:
        if len(set(nodes)) == 1:
            with on_nodes(nodes, "single_node") as comm:
                check_mean(comm)
            continue
        with pytest.raises(
            ValueError, match=f"rank {world.rank}: .*'single_node' takes ranks of one"
        ):
            on_nodes(nodes, "single_node")


def test_dummy_leaves_gradients_alone(world):
    with create_communicator("dummy") as comm:
        model = with_grads(w=np.full(3, float(world.rank)))
        comm.allreduce_grad(model)
        np.testing.assert_array_equal(model["w"].grad, np.full(3, float(world.rank)))


def test_an_unknown_name_lists_the_known(world):
    for name in ("Naive", "", None, 3):
        known = f"unknown communicator {name!r}; use one of: dummy, flat"
        with pytest.raises(ValueError, match=known):
            create_communicator(name)


@pytest.mark.sizes(2, 3, 4)
def test_a_wrong_name_on_one_rank_raises_on_all(world):
    wrong = world.rank == 1
    with pytest.raises(ValueError if wrong else PeerError, match="unknown communicator 'fast'"):
        create_communicator("fast" if wrong else "naive")
    with pytest.raises(RankMismatchError, match=r"communicator: naive on rank.*; flat on rank 1"):
        create_communicator("flat" if wrong else "naive")
    with pytest.raises(RankMismatchError, match="allreduce_grad_dtype"):
        create_communicator("flat", allreduce_grad_dtype="float16" if wrong else None)


def test_wrong_wire_dtype(world):
    for dtype in ("int32", "complex64", "half precision", 7):
        with pytest.raises(ValueError, match="allreduce_grad_dtype must be None, float16, float32"):
            create_communicator("naive", allreduce_grad_dtype=dtype)


def test_mpi_comm_stays_the_users(world):
    part = world.Split(0, world.size - world.rank)
    comm = create_communicator("naive", mpi_comm=part)
    assert comm.mpi_comm is part
    assert comm.rank == part.rank == world.size - 1 - world.rank
    comm.finalize()
    assert part.allreduce(1) == world.size
    part.Free()


def test_messages_of_the_user_do_not_mix_with_ours(naive, world):
    comm = naive
    request = world.isend("mine", (world.rank + 1) % world.size, tag=0)
    assert comm.allreduce_obj(1) == world.size
    if comm.size > 1:
        if comm.rank == 0:
            comm.send(np.ones(3), 1, 0)
        elif comm.rank == 1:
            np.testing.assert_array_equal(comm.recv(0, 0), np.ones(3))
    assert world.recv(source=(world.rank - 1) % world.size, tag=0) == "mine"
    request.wait()


def test_mpi_comm_must_be_an_intracommunicator():
    with pytest.raises(TypeError, match="mpi4py intracommunicator, got str"):
        create_communicator("naive", mpi_comm="world")


@over_nodes(*WAYS, "two_dimensional", "single_node", "non_cuda_aware")
def test_a_split_keeps_settings_and_its_part_of_the_topology(world, name, nodes):
    with on_nodes(nodes, name, allreduce_grad_dtype="float16") as comm:
        color = comm.rank % 2
        with comm.split(color, -comm.rank) as part, part.split(0, -part.rank) as again:
            members = list(range(color, comm.size, 2))
            assert part.allgather_obj(comm.rank) == members[::-1]
            assert again.allgather_obj(comm.rank) == members
            expected = Topology.of(nodes[rank] for rank in members)
            assert again.inter_size == expected.inter_size
            assert again.inter_rank == expected.inter_rank(again.rank)
            assert again.intra_rank == expected.intra_rank(again.rank)
            assert again.intra_size == expected.intra_size(again.rank)
            assert again.get_config() == comm.get_config()
            check_mean(again, 70_000)
            check_mean(part, 70_000)
            part.allreduce_grad(model := with_grads(w=np.full(3, comm.rank, "float32")))
            np.testing.assert_allclose(model["w"].grad, np.full(3, np.mean(members)))
        check_mean(comm, 70_000)


@pytest.mark.parametrize("name", by_name(*WAYS))
def test_finalize_leaves_others_alone(world, name):
    first, second = (create_communicator(name) for _ in range(2))
    part = first.split(0, -first.rank)
    for comm in (first, second, part):
        check_mean(comm, 70_000)
    first.finalize()
    for comm in (second, part):
        check_mean(comm, 70_000)
    third = create_communicator(name)
    for comm in (third, part, second):
        check_mean(comm, 70_000)
        comm.finalize()


def calls(comm):
    yield lambda: comm.send(1, 1, 0)
    yield lambda: comm.recv(1, 0)
    yield lambda: comm.send_obj(1, 1, 0)
    yield lambda: comm.recv_obj(1, 0)
    for verb in ("bcast", "gather", "allgather", "allreduce", "multi_node_mean"):
        yield lambda verb=verb: getattr(comm, verb)(1.0)
    for verb in ("bcast", "gather", "allgather", "allreduce"):
        yield lambda verb=verb: getattr(comm, f"{verb}_obj")(1)
    for verb in ("scatter", "alltoall", "scatter_obj", "alltoall_obj"):
        yield lambda verb=verb: getattr(comm, verb)([1] * comm.size)
    yield lambda: comm.bcast_data(Model(w=Param(np.ones(1))))
    yield lambda: comm.allreduce_grad(with_grads(w=np.ones(1)))
    yield lambda: comm.multi_node_mean_grad(with_grads(w=np.ones(1)))
    yield lambda: comm.split(0, 0)


def test_after_finalize_every_call_raises(naive):
    comm = naive
    comm.finalize()
    comm.finalize()
    for call in calls(comm):
        with pytest.raises(FinalizedError, match=f"rank {comm.rank}: .*finalized"):
            call()


@pytest.mark.parametrize("name", by_name(*WAYS))
def test_a_block_left_by_an_exception_waits_for_nobody(world, name):
    with create_communicator(name) as other:
        comm = create_communicator(name)
        for each in (comm, other):
            check_mean(each)
        if world.rank == 0:  # the others never leave the block
            memory = weakref.ref(reducer_of(comm))
            with pytest.raises(ZeroDivisionError):  # noqa: SIM117
                with comm:
                    raise ZeroDivisionError
            gc.collect()
            assert memory() is None
            with pytest.raises(FinalizedError):
                comm.bcast(1)
            comm.finalize()
            with comm:
                pass
        check_mean(other)
    with pytest.raises(FinalizedError):
        other.bcast(1)


def test_settings_of_old_scripts(naive):
    assert naive.get_config() == {
        "allreduce_grad_dtype": None,
        "batched_copy": False,
        "chunk_bytes": None,
    }
    naive.set_config("batched_copy", True)
    assert naive.get_config("batched_copy") is True
    naive.set_config("allreduce_grad_dtype", np.float16)
    assert naive.get_config("allreduce_grad_dtype") == np.float16
    for call in (lambda: naive.set_config("speed", 1), lambda: naive.get_config("speed")):
        with pytest.raises(ValueError, match="no setting 'speed'"):
            call()
    with pytest.raises(ValueError, match="allreduce_grad_dtype must be"):
        naive.set_config("allreduce_grad_dtype", "int8")


def test_public_names_exist():
    for name in chainermn_comm.__all__:
        assert hasattr(chainermn_comm, name)


def test_bfloat16_without_the_package_that_has_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # its import fails
    with pytest.raises(ValueError, match=r"'bfloat16' needs .* install ml_dtypes"):
        create_communicator("flat", allreduce_grad_dtype="bfloat16")
