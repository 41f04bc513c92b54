"""Ranks that disagree all raise, naming the ranks, and the communicator works afterwards."""

from __future__ import annotations

import re

import numpy as np
import pytest
from mpi4py import MPI

from chainermn_comm import RankMismatchError, create_communicator
from tests.support.worlds.models import with_grads

# Three ranks show all that two do, and that several have the same signature. The
# handshake comes before any algorithm is made, so the communicator's name makes no
# difference.
pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4), pytest.mark.ranks(3)]

ZEROS = np.zeros(2, "f4")
# What each method may be given.
GIVEN = {
    method: given
    for methods, *given in [
        ("bcast gather allgather allreduce multi_node_mean", ZEROS),
        ("scatter alltoall scatter_obj alltoall_obj", [ZEROS] * MPI.COMM_WORLD.size),
        ("bcast_obj gather_obj allgather_obj allreduce_obj", 1),
        ("bcast_data allreduce_grad", with_grads(w=ZEROS)),
        ("split", 0, 0),
    ]
    for method in methods.split()
}


def still_works(comm) -> None:
    assert comm.allreduce_obj(1) == comm.size
    np.testing.assert_array_equal(comm.allreduce(np.ones(2)), np.full(2, comm.size))


@pytest.mark.parametrize("method", GIVEN)
def test_ranks_that_call_different_methods_are_told(naive, method):
    other = list(GIVEN)[list(GIVEN).index(method) - 1]
    odd = naive.size - 1
    called = other if naive.rank == odd else method
    with pytest.raises(RankMismatchError) as caught:
        getattr(naive, called)(*GIVEN[called])
    text = str(caught.value)
    assert text.startswith(
        f"{called} on rank {naive.rank}: ranks disagree on operation"
    )
    assert f"{other} on rank {odd}" in text
    assert f"{method} on rank" in text
    assert re.search(
        rf"rank {odd} called {other} at tests/comm/test_mismatch.py:\d", text
    )
    assert re.search(rf"called {method} at tests/comm/test_mismatch.py:\d", text)
    still_works(naive)


@pytest.mark.parametrize(
    "method", ["bcast", "gather", "scatter", "bcast_obj", "gather_obj", "scatter_obj"]
)
def test_roots_that_differ_raise_on_all(naive, method):
    data = [1] * naive.size if "scatter" in method else 1
    with pytest.raises(
        RankMismatchError, match=r"disagree on root: 0 on rank.*; 1 on rank 1"
    ):
        getattr(naive, method)(data, root=int(naive.rank == 1))
    still_works(naive)


@pytest.mark.parametrize("method", ["allreduce", "multi_node_mean"])
def test_sums_of_arrays_that_do_not_fit(naive, method):
    three = np.zeros(3)
    for mine, theirs, told in [
        (three, np.zeros(4), r"float64 \(3,\) on rank.*float64 \(4,\)"),
        (three, np.zeros((3, 1)), r"\(3, 1\)"),
        (three, np.zeros(3, "float32"), "float32"),
        (np.zeros(3, "<f8"), np.zeros(3, ">f8"), ">f8"),
        (three, 0.0, r"\(\)"),
        ((three,), (three, three), "disagree on arrays: 1 on rank"),
    ]:
        with pytest.raises(RankMismatchError, match=told):
            getattr(naive, method)(theirs if naive.rank == naive.size - 1 else mine)
    still_works(naive)


def test_what_all_ranks_do_wrong_raises_on_each(naive):
    masked = np.ma.masked_array([1.0, 2.0], [0, 1])
    no_sum = rf"rank {naive.rank}: allreduce_obj can't add.*int, str"
    for call, told in [
        (lambda: naive.allreduce(masked), "would lose its mask"),
        (lambda: naive.allgather(masked), "would lose its mask"),
        (lambda: naive.allreduce_obj("a" if naive.rank else 1), no_sum),
        (
            lambda: naive.alltoall(x for x in range(9)),
            r"expected a tuple or list of . values",
        ),
    ]:
        with pytest.raises(TypeError, match=told):
            call()
    still_works(naive)


def test_wrong_peers_and_tags_raise_at_once(naive):
    nobody = f"rank {naive.rank}: (dest|source) must be"
    no_tag, other = f"rank {naive.rank}: tag must be", (naive.rank + 1) % naive.size
    for told, peer, tag in [
        *((nobody, peer, 0) for peer in (-1, 99, 0.0, None, True)),
        *(
            (no_tag, other, tag)
            for tag in (-1, naive.reserved_tag, 2**40, 1.5, None, "a")
        ),
        ("this rank itself", naive.rank, 0),
    ]:
        for name, *data in ("send", 1), ("send_obj", 1), ("recv",), ("recv_obj",):
            if (name, tag) == ("recv_obj", MPI.ANY_TAG):
                continue
            with pytest.raises(ValueError, match=told):
                getattr(naive, name)(*data, peer, tag)


def test_tags_up_to_the_largest_tell_messages_apart_and_numpy_integers_do_as_ranks(
    naive,
):
    zero, one = np.int64(0), np.uint8(1)
    tags = [zero, 6, MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) - 3]
    assert naive.bcast(naive.rank, root=one) == 1
    if naive.rank == 0:
        for tag in tags:
            naive.send(tag, one, tag)
    elif naive.rank == 1:
        for tag in reversed(tags):
            assert naive.recv(zero, tag) == tag
    naive.split(zero, np.int32(naive.rank)).finalize()


def test_settings_that_are_equal_need_not_look_equal(naive):
    model = with_grads(w=np.ones(2))
    naive.multi_node_mean_grad(model, zero_fill=1 if naive.rank else True)
    naive.set_config("allreduce_grad_dtype", "float32" if naive.rank else np.float32)
    naive.multi_node_mean_grad(model, zero_fill=np.bool_(True) if naive.rank else 2)
    with create_communicator(
        "naive", allreduce_grad_dtype=np.float32 if naive.rank else "f4"
    ):
        assert naive.get_config("allreduce_grad_dtype") == np.float32


def test_finalize_against_another_call_raises_on_all(world):
    comm = create_communicator("naive")
    call = comm.finalize if comm.rank == 0 else lambda: comm.allreduce(1)
    told = "operation: finalize on rank 0; allreduce on rank"
    with pytest.raises(RankMismatchError, match=told):
        call()
    still_works(comm)
    comm.finalize()
