"""Every object verb carries any picklable object, and a failure to pickle it is everybody's."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm import PeerError

pytestmark = pytest.mark.world


def thing(rank: int) -> dict:
    return {
        "rank": rank,
        "array": np.arange(rank + 3),
        "nested": [(rank, None), {"x": b"\0" * rank}],
    }


def check(found: dict, rank: int) -> None:
    expected = thing(rank)
    np.testing.assert_array_equal(found.pop("array"), expected.pop("array"))
    assert found == expected


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("this can't be pickled")


def _explode():
    raise RuntimeError("this can't be unpickled")


class Bomb:
    def __reduce__(self):
        return _explode, ()


@pytest.mark.sizes(2, 3, 4)
def test_send_obj_and_recv_obj(naive):
    if naive.rank == 0:
        for dest in range(1, naive.size):
            naive.send_obj(thing(dest), dest, tag=dest)
    else:
        check(naive.recv_obj(0, tag=naive.rank), naive.rank)


def test_bcast_obj_from_each_root(naive):
    for root in range(naive.size):
        check(
            naive.bcast_obj(thing(root) if naive.rank == root else Unpicklable(), root=root), root
        )


def test_gather_obj_is_in_rank_order(naive):
    for root in range(naive.size):
        found = naive.gather_obj(thing(naive.rank), root=root)
        if naive.rank != root:
            assert found is None
        else:
            assert isinstance(found, list)
            assert len(found) == naive.size
            for rank, obj in enumerate(found):
                check(obj, rank)


def test_allgather_obj(naive):
    for rank, obj in enumerate(naive.allgather_obj(thing(naive.rank))):
        check(obj, rank)


def test_scatter_obj(naive):
    objs = [thing(rank) for rank in range(naive.size)]
    check(naive.scatter_obj(objs if naive.rank == 0 else None), naive.rank)


def test_alltoall_obj(naive):
    found = naive.alltoall_obj([(naive.rank, rank) for rank in range(naive.size)])
    assert found == [(rank, naive.rank) for rank in range(naive.size)]


def test_allreduce_obj_adds_in_rank_order(naive):
    assert naive.allreduce_obj(f"{naive.rank}") == "0123"[: naive.size]
    assert naive.allreduce_obj([naive.rank]) == list(range(naive.size))
    assert naive.allreduce_obj(2) == 2 * naive.size


def test_received_arrays_can_be_written_to(naive):
    for array in naive.allgather_obj(np.zeros(1000)):
        array += 1
        assert array.sum() == 1000


@pytest.mark.parametrize("verb", ["bcast_obj", "gather_obj", "allgather_obj", "allreduce_obj"])
def test_an_object_that_cannot_be_pickled_fails_everywhere(naive, verb):
    for bad in range(naive.size):
        mine = Unpicklable() if naive.rank == bad else 1
        kwargs = {"root": bad} if verb == "bcast_obj" else {}
        expected = RuntimeError if naive.rank == bad else PeerError
        with pytest.raises(expected, match="can't be pickled"):
            getattr(naive, verb)(mine, **kwargs)
        assert naive.allreduce_obj(1) == naive.size


@pytest.mark.sizes(2, 3, 4)  # root keeps its own object
def test_an_object_that_cannot_be_unpickled_fails_everywhere(naive):
    with pytest.raises((RuntimeError, PeerError), match="can't be unpickled"):
        naive.bcast_obj(Bomb())
    assert naive.allreduce_obj(1) == naive.size
