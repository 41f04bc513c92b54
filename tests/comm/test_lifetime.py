"""How communicators are made, divided, set up and released."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref

import numpy as np
import pytest

import chainermn_comm
from chainermn_comm import FinalizedError, PeerError, RankMismatchError, create_communicator
from chainermn_comm.catalogue import make_communicator
from chainermn_comm.topology import Topology
from tests.support.models import Model, Param, with_grads
from tests.support.topologies import IMPOSED, NAMES

pytestmark = pytest.mark.world


def test_ranks_and_sizes(comm, world):
    assert (comm.rank, comm.size) == (world.rank, world.size)
    # All ranks of these tests run on one machine.
    assert (comm.intra_rank, comm.intra_size) == (world.rank, world.size)
    assert (comm.inter_rank, comm.inter_size) == (0, 1)


def test_imposed_topologies(world):
    for nodes in IMPOSED[world.size]:
        with make_communicator("naive", topology=Topology.of(nodes)) as comm:
            assert comm.inter_rank == nodes[world.rank]
            assert comm.inter_size == len(set(nodes))
            assert comm.intra_size == nodes.count(nodes[world.rank])
            assert comm.intra_rank == nodes[: world.rank].count(nodes[world.rank])


def test_the_default_works_without_gpus_and_without_a_warning(world):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comm = create_communicator()
    model = with_grads(w=np.full(3, float(world.rank)))
    comm.allreduce_grad(model)
    np.testing.assert_array_equal(model["w"].grad, np.full(3, (world.size - 1) / 2))
    comm.finalize()


def test_pure_nccl_says_why_not_and_what_instead():
    with pytest.raises(
        ValueError, match=r"'pure_nccl' is for GPUs.*on CPUs use one of: dummy, flat"
    ):
        create_communicator("pure_nccl")


def test_single_node_refuses_several_nodes(world):
    for nodes in IMPOSED[world.size]:
        topology = Topology.of(nodes)
        if topology.inter_size == 1:
            make_communicator("single_node", topology=topology).finalize()
            continue
        with pytest.raises(
            ValueError, match=f"rank {world.rank}: .*'single_node' takes ranks of one"
        ):
            make_communicator("single_node", topology=topology)


def test_dummy_leaves_gradients_alone(world):
    with create_communicator("dummy") as comm:
        model = with_grads(w=np.full(3, float(world.rank)))
        comm.allreduce_grad(model)
        np.testing.assert_array_equal(model["w"].grad, np.full(3, float(world.rank)))


@pytest.mark.parametrize("name", ["Naive", "", None, 3])
def test_an_unknown_name_lists_the_known(name):
    with pytest.raises(ValueError, match=f"unknown communicator {name!r}; use one of: dummy, flat"):
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


@pytest.mark.parametrize("dtype", ["int32", "complex64", "half precision", 7])
def test_wrong_wire_dtype(dtype):
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


def test_messages_of_the_user_do_not_mix_with_ours(comm, world):
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


@pytest.mark.parametrize("name", NAMES)
def test_split(name, world):
    with create_communicator(name, allreduce_grad_dtype="float16") as comm:
        color, key = comm.rank % 2, -comm.rank
        part = comm.split(color, key)
        members = sorted((r for r in range(comm.size) if r % 2 == color), reverse=True)
        assert part.size == len(members)
        assert members[part.rank] == comm.rank
        assert part.get_config() == comm.get_config()
        assert part.allgather_obj(comm.rank) == members
        model = with_grads(w=np.full(3, comm.rank, "float32"))
        part.allreduce_grad(model)
        np.testing.assert_allclose(model["w"].grad, np.full(3, np.mean(members)))
        part.finalize()
        assert comm.allreduce_obj(1) == comm.size


def test_split_keeps_an_imposed_topology(world):
    nodes = IMPOSED[world.size][-1]
    with make_communicator("naive", topology=Topology.of(nodes)) as comm:
        part = comm.split(0, -comm.rank)
        assert part.inter_size == comm.inter_size
        assert part.intra_size == comm.intra_size
        part.finalize()


def test_many_communicators_can_be_made(world):
    for _ in range(300):  # two MPI communicators each; MPICH has about 2,000
        with create_communicator("naive") as comm:
            comm.split(0, 0).finalize()


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


def test_after_finalize_every_call_raises(comm):
    comm.finalize()
    comm.finalize()
    for call in calls(comm):
        with pytest.raises(FinalizedError, match=f"rank {comm.rank}: .*finalized"):
            call()


def test_a_with_block_finalizes():
    with create_communicator("naive") as comm:
        pass
    with pytest.raises(FinalizedError):
        comm.bcast(1)


@pytest.mark.parametrize("name", NAMES)
def test_a_block_left_by_an_exception_waits_for_nobody(world, name):
    with make_communicator(name) as other:
        comm = make_communicator(name)
        for each in (comm, other):
            each.allreduce_grad(with_grads(w=np.full(9, float(world.rank))))
        if world.rank == 0:  # the others never leave the block
            memory = weakref.ref(comm._reducers.made(False))
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
        model = with_grads(w=np.full(9, float(world.rank)))
        other.allreduce_grad(model)
        np.testing.assert_array_equal(model["w"].grad, np.full(9, (world.size - 1) / 2))


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
