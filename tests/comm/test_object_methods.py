"""Every object method carries any picklable object, and a failure to unpickle it is everybody's."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.world


def thing(rank: int) -> dict:
    nested = [(rank, None), {"x": b"\0" * rank}]
    return {"rank": rank, "array": np.arange(rank + 3), "nested": nested}


def test_every_method_carries_any_object_from_and_to_any_rank(naive):
    me, size = naive.rank, naive.size
    things, same = [thing(rank) for rank in range(size)], np.testing.assert_equal
    if me == 0:
        for dest in range(1, size):
            naive.send_obj(things[dest], dest, tag=dest)
    else:
        same(naive.recv_obj(0, tag=me), things[me])
    for root in range(size):
        given = things[root] if me == root else lambda: "can't be pickled"
        same(naive.bcast_obj(given, root=root), things[root])
        found = naive.gather_obj(things[me], root=root)
        assert isinstance(found, list) == (me == root)
        same(found, things if me == root else None)
        same(naive.scatter_obj(things if me == root else None, root=root), things[me])
    same(naive.allgather_obj(things[me]), things)
    found = naive.alltoall_obj([(me, rank) for rank in range(size)])
    assert found == [(rank, me) for rank in range(size)]
    assert naive.allreduce_obj(f"{me}") == "0123"[:size]  # in rank order
    assert naive.allreduce_obj([me]) == list(range(size))
    assert naive.allreduce_obj(2) == 2 * size
    for array in naive.allgather_obj(np.zeros(1000)):
        array += 1  # it is writable
        assert array.sum() == 1000


@pytest.mark.sizes(2, 3)
def test_without_a_tag_the_next_object_is_received(naive):
    things = [thing(1), bytes(1 << 20)]
    if naive.rank == 0:
        for each, tag in zip(things, (5, 9), strict=True):
            naive.send_obj(each, 1, tag)
    elif naive.rank == 1:
        np.testing.assert_equal([naive.recv_obj(0), naive.recv_obj(0)], things)


@pytest.mark.sizes(2, 3)
def test_without_a_tag_a_message_of_another_function_stays_where_it_is(naive):
    if naive.rank == 0:
        naive.send_with_metadata(b"gradients", (np.ones(3),), 1, naive.reserved_tag)
        naive.send_obj("mine", 1, 5)
    elif naive.rank == 1:
        with pytest.raises(
            TypeError, match=r"rank 1: recv_obj without a tag .* give the tag"
        ):
            naive.recv_obj(0)
        assert naive.recv_obj(0, 5) == "mine"
        assert naive.recv_with_metadata(0, naive.reserved_tag)[0] == b"gradients"
