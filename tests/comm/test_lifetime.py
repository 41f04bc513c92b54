"""How communicators are made, divided, set up and released."""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import suppress

import numpy as np
import pytest
from mpi4py import MPI
from numpy.testing import assert_array_equal

from chainermn_comm import (
    FinalizedError,
    RankMismatchError,
    Topology,
    create_communicator,
)
from tests.comm.methods import GIVEN
from tests.support.oracles.raised import raises_on_all
from tests.support.worlds.models import check_mean, with_grads
from tests.support.worlds.topologies import (
    ALGORITHMS,
    algorithm_of,
    by_name,
    on_nodes,
    over_nodes,
)

pytestmark = pytest.mark.world


def place(comm):
    return comm.intra_rank, comm.intra_size, comm.inter_rank, comm.inter_size


def test_ranks_know_their_place(comm, world):
    assert comm.rank == world.rank
    assert comm.size == world.size
    assert place(comm) == (world.rank, world.size, 0, 1)  # all run on one machine


@pytest.mark.parametrize(
    ("name", "how", "told"),
    [
        ("pure_nccl", {}, r"'pure_nccl' is for GPUs.*on CPUs use one of: flat"),
        ("", {}, "unknown communicator ''; use one of: flat, hier"),
        (None, {}, "unknown communicator None; use one of: flat, hier"),
        ("Naive", {}, r"'Naive' \(did you mean 'naive'\?\); use one of: flat"),
        ("dumb", {}, r"two_dimensional, dummy \(which exchanges nothing\)$"),
        *[
            ("naive", {"allreduce_grad_dtype": dtype}, "_dtype must be None, float16")
            for dtype in ("int32", "complex64", "half precision", 7)
        ],
        ("flat", {"allreduce_grad_dtype": "bfloat16"}, "needs .* install ml_dtypes"),
        ("naive", {"mpi_comm": "world"}, "mpi4py intracommunicator, .*got str"),
    ],
)
def test_what_cannot_be_made_says_why_and_what_can(world, monkeypatch, name, how, told):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # its import fails
    with pytest.raises((ValueError, TypeError), match=told):
        create_communicator(name, **how)


def test_a_rank_without_a_part_in_a_split_is_told(world):
    color = 0
    if world.rank:
        color = MPI.UNDEFINED
    part = world.Split(color)
    if world.rank == 0:
        with create_communicator("naive", part) as comm:
            check_mean(comm)
        part.Free()
    with pytest.raises(TypeError, match="intracommunicator, and not COMM_NULL"):
        create_communicator("naive", part)


@pytest.mark.sizes(2, 3, 4)
def test_single_node_refuses_several_nodes(world):
    told = f"rank {world.rank}: .*'single_node' takes ranks of one"
    with pytest.raises(ValueError, match=told):
        on_nodes([0] * (world.size - 1) + [1], "single_node")


def test_dummy_leaves_gradients_alone(world):
    with create_communicator("dummy", reproducible=True) as comm:
        model = with_grads(w=np.full(3, float(world.rank)))
        comm.allreduce_grad(model)
        assert_array_equal(model["w"].grad, world.rank)


@pytest.mark.sizes(2, 3, 4)
def test_ranks_that_make_different_ones_are_told(world):
    wrong = world.rank == 1
    for name in ("fast", ["naive"]):  # the latter can't be hashed
        given = "naive"
        if wrong:
            given = name
        with raises_on_all(wrong, ValueError, "unknown communicator"):
            create_communicator(given)
    told = "reproducible must be True or False, got 'yes'"
    reproducible = True
    if wrong:
        reproducible = "yes"
    with raises_on_all(wrong, ValueError, told):
        create_communicator("naive", reproducible=reproducible)
    for odd, told in [
        ({"communicator_name": "naive"}, r"communicator: flat on.*; naive on rank 1"),
        ({"allreduce_grad_dtype": "float16"}, "allreduce_grad_dtype"),
        ({"reproducible": True}, r"reproducible: False on rank.*; True on rank 1"),
    ]:
        how = {"communicator_name": "flat"}
        if wrong:
            how |= odd
        with pytest.raises(RankMismatchError, match=told):
            create_communicator(**how)


def test_mpi_comm_stays_the_users(world):
    part = world.Split(0, -world.rank)
    with create_communicator("naive", part) as comm:
        assert comm.mpi_comm is part
        assert comm.rank == part.rank
        assert part.rank == world.size - 1 - world.rank
    assert part.allreduce(1) == world.size
    part.Free()


@pytest.mark.sizes(2)
def test_messages_of_the_user_do_not_mix_with_ours(naive, world):
    request = world.isend("mine", 1 - world.rank)
    assert naive.allreduce_obj(1) == 2
    if world.rank == 0:
        naive.send(3, 1, 0)
    else:
        assert naive.recv(0, 0) == 3
    assert world.recv() == "mine"
    request.wait()


@over_nodes("flat", "hierarchical", "two_dimensional")
def test_a_split_keeps_settings_and_its_part_of_the_topology(world, name, nodes):
    with on_nodes(nodes, name, allreduce_grad_dtype="float16") as comm:
        color = comm.rank % 2
        members = list(range(color, comm.size, 2))[::-1]
        with comm.split(color, -comm.rank) as part:
            assert part.allgather_obj(comm.rank) == members
            assert part.get_config() == comm.get_config()
            told = Topology.of(nodes[rank] for rank in members)
            assert place(part) == (
                told.intra_rank(part.rank),
                told.intra_size(part.rank),
                told.inter_rank(part.rank),
                told.inter_size,
            )
            check_mean(part, 70_000)
        check_mean(comm, 70_000)


def test_after_finalize_every_call_raises(naive):
    naive.finalize()
    naive.finalize()
    messages = {
        "send": (1, 1, 0),
        "send_obj": (1, 1, 0),
        "recv": (1,),
        "recv_obj": (1,),
    }
    for name, given in (GIVEN | messages).items():
        with pytest.raises(FinalizedError, match=f"rank {naive.rank}: .*finalized"):
            getattr(naive, name)(*given)


@pytest.mark.parametrize("name", by_name(*ALGORITHMS))
def test_a_block_left_by_an_exception_waits_for_nobody(world, name):
    with create_communicator(name) as other:
        comm = create_communicator(name)
        check_mean(comm)
        check_mean(other)
        if world.rank == 0:  # the others never leave the block
            memory = weakref.ref(algorithm_of(comm))
            with suppress(ZeroDivisionError), comm:
                raise ZeroDivisionError
            gc.collect()
            assert memory() is None
            with pytest.raises(FinalizedError):
                comm.bcast(1)
            comm.finalize()
        check_mean(other)
    with pytest.raises(FinalizedError):
        other.bcast(1)


def test_settings_of_old_scripts(naive):
    assert naive.get_config() == {
        "allreduce_grad_dtype": None,
        "batched_copy": False,
        "chunk_bytes": None,
        "reproducible": False,
    }
    naive.set_config("batched_copy", True)
    assert naive.get_config("batched_copy") is True
    for name, value, told in [
        ("speed", 1, "no setting 'speed'"),
        ("allreduce_grad_dtype", "int8", "allreduce_grad_dtype must be"),
        ("reproducible", True, "create_communicator takes reproducible"),
    ]:
        with pytest.raises(ValueError, match=told):
            naive.set_config(name, value)
    with pytest.raises(KeyError, match="no setting 'speed'"):
        naive.get_config("speed")
