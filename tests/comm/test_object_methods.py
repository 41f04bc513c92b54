"""Every object method carries any picklable object, and a failure to unpickle it is everybody's."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from numpy.testing import assert_equal

pytestmark = pytest.mark.world


def thing(rank):
    return {"rank": rank, "array": np.arange(rank + 3), "nested": [(b"x" * rank, None)]}


def test_every_method_carries_any_object_from_and_to_any_rank(naive):
    me = naive.rank
    ranks = range(naive.size)
    things = [thing(rank) for rank in ranks]
    mine = things[me]
    same = assert_equal
    for root in ranks:
        is_root = me == root
        given = sys.stdout  # can't be pickled
        on_root = None
        if is_root:
            given = mine
            on_root = things
        same(naive.bcast_obj(given, root=root), things[root])
        same(naive.gather_obj(mine, root=root), on_root)
        same(naive.scatter_obj(on_root, root=root), mine)
        if is_root:
            for dest in set(ranks) - {root}:
                naive.send_obj(things[dest], dest, tag=dest)
        else:
            same(naive.recv_obj(root, tag=me), mine)
    gathered = naive.allgather_obj(mine)
    same(gathered, things)
    gathered[-1]["array"] += 1  # it is writable
    found = naive.alltoall_obj([(me, rank) for rank in ranks])
    assert found == [(rank, me) for rank in ranks]
    assert naive.allreduce_obj(f"{me}") == "0123"[: naive.size]  # in rank order


@pytest.mark.sizes(2, 3)
def test_without_a_tag_the_next_object_is_received(naive):
    """But a message of another function stays where it is."""
    large = bytes(1 << 20)
    if naive.rank == 0:
        naive.send_obj(large, 1, 9)
        naive.send_with_metadata(b"gradients", (np.ones(3),), 1, naive.reserved_tag)
        naive.send_obj("mine", 1, 5)
    elif naive.rank == 1:
        assert naive.recv_obj(0) == large
        told = r"rank 1: recv_obj without a tag .* give the tag"
        with pytest.raises(TypeError, match=told):
            naive.recv_obj(0)
        assert naive.recv_obj(0, 5) == "mine"
        assert naive.recv_with_metadata(0, naive.reserved_tag)[0] == b"gradients"
