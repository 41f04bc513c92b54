"""How communicators are made, divided, set up and released."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
from mpi4py import MPI

from chainermn_comm import (
    CommunicationError,
    FinalizedError,
    PeerError,
    RankMismatchError,
    Topology,
    create_communicator,
)
from tests.support.worlds.models import check_mean, with_grads
from tests.support.worlds.planted import interrupted_while_ranks_compare
from tests.support.worlds.topologies import (
    ALGORITHMS,
    IMPOSED,
    algorithm_of,
    by_name,
    on_nodes,
    over_nodes,
)

pytestmark = pytest.mark.world


def place(comm) -> tuple[int, ...]:
    return comm.intra_rank, comm.intra_size, comm.inter_rank, comm.inter_size


def test_ranks_know_their_place(comm, world):
    assert (comm.rank, comm.size) == (world.rank, world.size)
    assert place(comm) == (world.rank, world.size, 0, 1)  # all run on one machine
    for nodes in IMPOSED[world.size]:
        with on_nodes(nodes, "naive") as imposed:
            mine, before = nodes[world.rank], nodes[: world.rank]
            assert place(imposed) == (
                before.count(mine),
                nodes.count(mine),
                mine,
                len(set(nodes)),
            )


def test_the_default_works_without_gpus_and_without_a_warning(world):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comm = create_communicator()
    check_mean(comm)
    comm.finalize()


@pytest.mark.parametrize(
    ("name", "how", "told"),
    [
        ("pure_nccl", {}, r"'pure_nccl' is for GPUs.*on CPUs use one of: flat"),
        *(
            (name, {}, f"unknown communicator {name!r}; use one of: flat, hier")
            for name in ("", None, 3)
        ),
        ("Naive", {}, r"'Naive' \(did you mean 'naive'\?\); use one of: flat"),
        ("dumb", {}, r"two_dimensional, dummy \(which exchanges nothing\)$"),
        *(
            (
                "naive",
                {"allreduce_grad_dtype": dtype},
                "allreduce_grad_dtype must be None, float16",
            )
            for dtype in ("int32", "complex64", "half precision", 7)
        ),
        ("naive", {"mpi_comm": "world"}, "mpi4py intracommunicator, .*got str"),
        ("naive", {"mpi_comm": MPI.COMM_NULL}, "intracommunicator, and not COMM_NULL"),
    ],
)
def test_what_cannot_be_made_says_why_and_what_can(world, name, how, told):
    with pytest.raises((ValueError, TypeError), match=told):
        create_communicator(name, **how)


def test_a_rank_without_a_part_in_a_split_is_told(world):
    part = world.Split(MPI.UNDEFINED if world.rank else 0)
    with create_communicator("naive") as comm:
        kind = type(comm)
    for make in create_communicator, lambda _, comm: kind(comm):
        if world.rank:
            with pytest.raises(TypeError, match="intracommunicator, and not COMM_NULL"):
                make("naive", part)
        else:
            with make("naive", part) as comm:
                check_mean(comm)
    if not world.rank:
        part.Free()
        with pytest.raises(TypeError, match="intracommunicator, and not COMM_NULL"):
            create_communicator("naive", part)


def test_single_node_refuses_several_nodes(world):
    for nodes in IMPOSED[world.size]:
        if len(set(nodes)) == 1:
            with on_nodes(nodes, "single_node") as comm:
                check_mean(comm)
            continue
        told = f"rank {world.rank}: .*'single_node' takes ranks of one"
        with pytest.raises(ValueError, match=told):
            on_nodes(nodes, "single_node")


def test_dummy_leaves_gradients_alone(world):
    with create_communicator("dummy") as comm:
        model = with_grads(w=np.full(3, float(world.rank)))
        comm.allreduce_grad(model)
        np.testing.assert_array_equal(model["w"].grad, np.full(3, float(world.rank)))


@pytest.mark.sizes(2, 3, 4)
def test_a_wrong_name_on_one_rank_raises_on_all(world):
    wrong = world.rank == 1
    for name in ("fast", ["naive"]):  # the latter can't be hashed
        with pytest.raises(
            ValueError if wrong else PeerError, match="unknown communicator"
        ):
            create_communicator(name if wrong else "naive")
    with pytest.raises(
        RankMismatchError, match=r"communicator: naive on rank.*; flat on rank 1"
    ):
        create_communicator("flat" if wrong else "naive")
    with pytest.raises(RankMismatchError, match="allreduce_grad_dtype"):
        create_communicator("flat", allreduce_grad_dtype="float16" if wrong else None)


def test_mpi_comm_stays_the_users(world):
    part = world.Split(0, world.size - world.rank)
    comm = create_communicator("naive", mpi_comm=part)
    assert comm.mpi_comm is part
    assert comm.rank == part.rank == world.size - 1 - world.rank
    comm.finalize()
    assert part.allreduce(1) == world.size
    part.Free()


def test_messages_of_the_user_do_not_mix_with_ours(naive, world):
    request = world.isend("mine", (world.rank + 1) % world.size, tag=0)
    assert naive.allreduce_obj(1) == world.size
    if world.rank == 0 < world.size - 1:
        naive.send(np.ones(3), 1, 0)
    elif world.rank == 1:
        np.testing.assert_array_equal(naive.recv(0, 0), np.ones(3))
    assert world.recv(source=(world.rank - 1) % world.size, tag=0) == "mine"
    request.wait()


@over_nodes(*ALGORITHMS, "two_dimensional", "single_node", "non_cuda_aware")
def test_a_split_keeps_settings_and_its_part_of_the_topology(world, name, nodes):
    with on_nodes(nodes, name, allreduce_grad_dtype="float16") as comm:
        color = comm.rank % 2
        with comm.split(color, -comm.rank) as part, part.split(0, -part.rank) as again:
            members = list(range(color, comm.size, 2))
            assert part.allgather_obj(comm.rank) == members[::-1]
            assert again.allgather_obj(comm.rank) == members
            told, me = Topology.of(nodes[rank] for rank in members), again.rank
            expected = told.intra_rank(me), told.intra_size(me), told.inter_rank(me)
            assert place(again) == (*expected, told.inter_size)
            assert again.get_config() == comm.get_config()
            check_mean(again, 70_000)
            check_mean(part, 70_000)
            part.allreduce_grad(model := with_grads(w=np.full(3, comm.rank, "float32")))
            np.testing.assert_allclose(model["w"].grad, np.full(3, np.mean(members)))
        check_mean(comm, 70_000)


@pytest.mark.parametrize("name", by_name(*ALGORITHMS))
def test_finalize_leaves_others_alone(world, name):
    first, second = (create_communicator(name) for _ in range(2))
    part = first.split(0, -first.rank)
    for comm in (first, second, part):
        check_mean(comm, 70_000)
    first.finalize()
    check_mean(part, 70_000)
    for comm in (create_communicator(name), part, second):
        check_mean(comm, 70_000)
        comm.finalize()


def test_after_finalize_every_call_raises(naive):
    naive.finalize()
    naive.finalize()
    for names, *arguments in [
        ("send send_obj", 1, 1, 0),
        ("recv recv_obj split", 1, 0),
        ("bcast gather allgather allreduce multi_node_mean", 1.0),
        ("bcast_obj gather_obj allgather_obj allreduce_obj", 1),
        ("scatter alltoall scatter_obj alltoall_obj", [1] * naive.size),
        ("bcast_data allreduce_grad multi_node_mean_grad", with_grads(w=np.ones(1))),
    ]:
        for name in names.split():
            with pytest.raises(FinalizedError, match=f"rank {naive.rank}: .*finalized"):
                getattr(naive, name)(*arguments)


@pytest.mark.parametrize("name", by_name(*ALGORITHMS))
def test_a_block_left_by_an_exception_waits_for_nobody(world, name):
    with create_communicator(name) as other:
        comm = create_communicator(name)
        for each in (comm, other):
            check_mean(each)
        if world.rank == 0:  # the others never leave the block
            memory = weakref.ref(algorithm_of(comm))
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
    settings = {"allreduce_grad_dtype": None, "batched_copy": False}
    settings |= {"chunk_bytes": None, "reproducible": False}
    assert naive.get_config() == settings
    for name, value in (("batched_copy", True), ("allreduce_grad_dtype", np.float16)):
        naive.set_config(name, value)
        assert naive.get_config(name) == value
    with pytest.raises(ValueError, match="no setting 'speed'"):
        naive.set_config("speed", 1)
    with pytest.raises(KeyError, match="no setting 'speed'"):
        naive.get_config("speed")
    with pytest.raises(ValueError, match="allreduce_grad_dtype must be"):
        naive.set_config("allreduce_grad_dtype", "int8")


def test_bfloat16_without_the_package_that_has_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # its import fails
    with pytest.raises(ValueError, match=r"'bfloat16' needs .* install ml_dtypes"):
        create_communicator("flat", allreduce_grad_dtype="bfloat16")


@pytest.mark.sizes(2, 3, 4)
def test_what_a_handler_raises_in_a_handshake_is_not_taken_for_all_ranks_error(world):
    """Though it is of a type that all ranks may raise."""
    comm, wrong = create_communicator("naive"), world.rank == 1
    planted = (
        interrupted_while_ranks_compare(PeerError("planted"))
        if wrong
        else nullcontext()
    )
    with planted, pytest.raises(PeerError if wrong else RankMismatchError):
        comm.allreduce(np.ones(2 + wrong))
    if wrong:
        with pytest.raises(
            CommunicationError, match=r"allreduce was interrupted .*planted"
        ):
            comm.allreduce(np.ones(2))


@pytest.mark.sizes(2, 3, 4)
def test_a_mean_that_was_interrupted_leaves_a_communicator_that_says_so(
    world, monkeypatch
):
    """What all ranks do together has begun, and they may be at different steps of it."""

    def interrupt(_):
        raise KeyboardInterrupt

    model = with_grads(w=np.ones(300_000, "f4"))
    comm = create_communicator("hierarchical")
    comm.allreduce_grad(model)
    monkeypatch.setattr(algorithm_of(comm), "allreduce", interrupt)
    with pytest.raises(KeyboardInterrupt):
        comm.allreduce_grad(model)
    words = rf"rank {world.rank}: a mean of gradients was interrupted .*\(KeyboardInterrupt.*make a"
    for call in (comm.allreduce_grad, comm.bcast_obj, comm.bcast_data, comm.allreduce):
        with pytest.raises(CommunicationError, match=words):
            call(model)
    with pytest.raises(CommunicationError, match=words):
        comm.send(np.ones(1), (world.rank + 1) % world.size, 3)
    comm.finalize()  # waits for nobody
    assert algorithm_of(comm) is not None  # MPI may still write there
    with create_communicator("hierarchical") as another:
        check_mean(another, 300_000)
