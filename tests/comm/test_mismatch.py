"""Ranks that disagree all raise, naming the ranks, and the communicator works afterwards."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

from chainermn_comm import RankMismatchError, create_communicator
from tests.comm.methods import GIVEN
from tests.support.worlds.models import with_grads

# Three ranks show all that two do, and that several have the same signature. The
# handshake comes before any algorithm is made, so the communicator's name makes no
# difference.
pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4), pytest.mark.ranks(3)]


def still_works(comm):
    assert comm.allreduce_obj(1) == comm.size
    assert comm.allreduce(1.0) == comm.size


@pytest.mark.parametrize("method", GIVEN)
def test_ranks_that_call_different_methods_are_told(naive, method):
    order = list(GIVEN)
    other = order[order.index(method) - 1]
    odd = naive.size - 1
    called = method
    if naive.rank == odd:
        called = other
    here = r"at tests/comm/test_mismatch.py:\d"
    told = (
        rf"^{called} on rank {naive.rank}: ranks disagree on operation: {method} on "
        rf"rank.*; {other} on rank {odd} \(.*called {method} {here}.*"
        rf"rank {odd} called {other} {here}"
    )
    with pytest.raises(RankMismatchError, match=told):
        getattr(naive, called)(*GIVEN[called])
    still_works(naive)


@pytest.mark.parametrize(
    "method", ["bcast", "gather", "scatter", "bcast_obj", "gather_obj", "scatter_obj"]
)
def test_roots_that_differ_raise_on_all(naive, method):
    told = r"disagree on root: 0 on rank.*; 1 on rank 1"
    root = int(naive.rank == 1)
    with pytest.raises(RankMismatchError, match=told):
        getattr(naive, method)(GIVEN[method][0], root=root)
    still_works(naive)


@pytest.mark.parametrize("method", ["allreduce", "multi_node_mean"])
def test_sums_of_arrays_that_do_not_fit(naive, method):
    three = np.zeros(3)
    odd = naive.rank == naive.size - 1
    for other, told in [
        (np.zeros((3, 1)), r"float64 \(3,\) on rank.*float64 \(3, 1\)"),
        (np.zeros(3, "float32"), "float32"),
        (np.zeros(3, ">f8"), ">f8"),
        (0.0, r"\(\)"),
        ((three, three), "disagree on arrays: 1 on rank"),
    ]:
        argument = three
        if odd:
            argument = other
        with pytest.raises(RankMismatchError, match=told):
            getattr(naive, method)(argument)
    still_works(naive)


@pytest.mark.parametrize("method", ["allreduce", "allgather"])
def test_a_masked_array_is_refused_on_each_rank(naive, method):
    with pytest.raises(TypeError, match="would lose its mask"):
        getattr(naive, method)(np.ma.masked_array([1.0, 2.0], [0, 1]))
    still_works(naive)


def test_objects_that_cannot_be_added_raise_on_each_rank(naive):
    told = rf"rank {naive.rank}: allreduce_obj can't add.*int, str"
    mine = 1
    if naive.rank:
        mine = "a"
    with pytest.raises(TypeError, match=told):
        naive.allreduce_obj(mine)
    still_works(naive)


@pytest.mark.parametrize("method", ["send", "send_obj", "recv", "recv_obj"])
def test_wrong_peers_and_tags_raise_at_once(naive, method):
    data = ()
    if "send" in method:
        data = (1,)
    other = (naive.rank + 1) % naive.size
    for told, peer, tag in [
        *[("(dest|source) must be", peer, 0) for peer in (-1, 99, 0.0, None, True)],
        *[("tag must be", other, tag) for tag in (naive.reserved_tag, 2**40, 1.5)],
        (".*this rank itself", naive.rank, 0),
    ]:
        with pytest.raises(ValueError, match=f"rank {naive.rank}: {told}"):
            getattr(naive, method)(*data, peer, tag)


def test_tags_up_to_the_largest_tell_messages_apart_and_numpy_integers_do_as_ranks(
    naive,
):
    assert naive.bcast(naive.rank, root=np.uint8(1)) == 1
    largest = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) - 3
    if naive.rank == 0:
        naive.send(0, np.uint8(1), np.int64(0))
        naive.send(largest, 1, largest)
    elif naive.rank == 1:
        assert naive.recv(0, largest) == largest
        assert naive.recv(np.int64(0), 0) == 0
    naive.split(np.int64(0), np.int32(naive.rank)).finalize()


def test_settings_that_are_equal_need_not_look_equal(naive):
    model = with_grads(w=np.ones(2))
    fill = 2
    if naive.rank:
        fill = np.bool_(True)
    naive.multi_node_mean_grad(model, zero_fill=fill)
    dtype = np.float32
    if naive.rank:
        dtype = "float32"
    naive.set_config("allreduce_grad_dtype", dtype)
    naive.multi_node_mean_grad(model)
    assert naive.get_config("allreduce_grad_dtype") == np.float32


def test_finalize_against_another_call_raises_on_all(world):
    comm = create_communicator("naive")
    call = comm.finalize
    if comm.rank:
        call = partial(comm.allreduce, 1)
    told = "operation: finalize on rank 0; allreduce on rank"
    with pytest.raises(RankMismatchError, match=told):
        call()
    still_works(comm)
    comm.finalize()
