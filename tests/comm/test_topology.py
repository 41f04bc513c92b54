"""Nodes are numbered by their lowest rank, whether or not their ranks are contiguous."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chainermn_comm import Topology


def test_nodes_may_be_restricted_to_some_ranks():
    assert Topology.of("aabb").restrict([3, 1, 2]).nodes == (0, 1, 0)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_every_rank_has_a_place(labels):
    topology = Topology.of(labels)
    order = list(dict.fromkeys(labels))  # of nodes
    assert topology.inter_size == len(order)
    for rank, label in enumerate(labels):
        assert topology.inter_rank(rank) == order.index(label)
        assert topology.intra_rank(rank) == labels[:rank].count(label)
        assert topology.intra_size(rank) == labels.count(label)
