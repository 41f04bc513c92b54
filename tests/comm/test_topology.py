"""Nodes are numbered by their lowest rank, whether or not their ranks are contiguous."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chainermn_comm import Topology


def test_interleaved_hosts():
    topology = Topology.of(["b", "a", "b", "a", "b"])
    assert topology.nodes == (0, 1, 0, 1, 0)
    assert Topology.of("aabb").restrict([3, 1, 2]).nodes == (0, 1, 0)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_every_rank_has_a_place(labels):
    topology = Topology.of(labels)
    places = {(topology.inter_rank(r), topology.intra_rank(r)) for r in range(topology.size)}
    assert len(places) == len(labels)
    for node in range(topology.inter_size):
        ranks = [rank for rank, other in enumerate(topology.nodes) if other == node]
        assert [topology.intra_rank(rank) for rank in ranks] == list(range(len(ranks)))
        assert all(topology.intra_size(rank) == len(ranks) for rank in ranks)
