"""Nodes are numbered by their lowest rank, whether or not their ranks are contiguous."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chainermn_comm import Topology


def test_interleaved_hosts():
    topology = Topology.of(["b", "a", "b", "a", "b"])
    assert topology.nodes == (0, 1, 0, 1, 0)
    assert Topology.of("aabb").restrict([3, 1, 2]).nodes == (0, 1, 0)


class Counted(tuple):
    """It counts how often all of it is looked at."""

    looks = 0

    def __iter__(self):
        Counted.looks += 1
        return super().__iter__()

    def __getitem__(self, index):
        Counted.looks += isinstance(index, slice)
        return super().__getitem__(index)

    def count(self, value):
        Counted.looks += 1
        return super().count(value)


def test_each_answer_takes_the_same_time_however_many_ranks_there_are():
    size = 10_000
    topology = Topology(Counted(rank // 8 for rank in range(size)))
    for rank in range(size):
        assert topology.inter_rank(rank) == rank // 8
        assert topology.intra_rank(rank) == rank % 8
        assert topology.intra_size(rank) == topology.least_intra_size == 8
        assert (topology.size, topology.inter_size) == (size, size // 8)
    assert 1 <= Counted.looks <= 3


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_every_rank_has_a_place(labels):
    topology = Topology.of(labels)
    places = {
        (topology.inter_rank(r), topology.intra_rank(r)) for r in range(topology.size)
    }
    assert len(places) == len(labels)
    for node in range(topology.inter_size):
        ranks = [rank for rank, other in enumerate(topology.nodes) if other == node]
        assert [topology.intra_rank(rank) for rank in ranks] == list(range(len(ranks)))
        assert all(topology.intra_size(rank) == len(ranks) for rank in ranks)
