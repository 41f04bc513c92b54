"""What each rank receives and does at its start, of 16 to 256 ranks over a double of MPI."""

from __future__ import annotations

from math import log2

import pytest

from tests.support.monitors import FANOUT, machines_of, neighbours
from tests.support.starting import RECORD_BYTES, compared_clocks, started

HERE = ["127.0.0.1"]
# Each rank's part of what is gathered from all: handshake, colors and keys of four splits, node.
BYTES_A_RANK = 128 + 4 * 8 + 4
# Besides: the ranks of the own machine describe themselves, and neighbours give addresses.
BYTES_A_NEIGHBOUR = 1500


@pytest.mark.parametrize("ranks_per_node", [1, 8])
def test_each_rank_receives_little_of_each_other_and_rank_0_no_more(monkeypatch, ranks_per_node):
    lines = []
    for size in (64, 256):
        start = started(monkeypatch, size, ranks_per_node, HERE)
        nodes = size // ranks_per_node
        near = BYTES_A_NEIGHBOUR * (ranks_per_node + FANOUT + 1)
        received = start.counts.received
        assert max(received.values()) <= BYTES_A_RANK * size + RECORD_BYTES * nodes + near
        leaders = [received[rank] for rank in range(0, size, ranks_per_node)]
        assert leaders[0] <= min(leaders) + near
        # Those that are no leaders hear of no other machine.
        rest = [count for rank, count in received.items() if rank % ranks_per_node]
        assert max(rest, default=0) <= BYTES_A_RANK * size + near
        lines.append(max(start.counts.lines.values()))
    assert lines[1] <= lines[0] + 32  # for more neighbours and steps in trees


def test_a_monitor_of_each_machine_knows_all_and_its_rank_hears_of_neighbours(monkeypatch):
    start = started(monkeypatch, 64, 4, HERE)
    assert sorted(start.monitors) == list(range(0, 64, 4))
    for leader, config in start.monitors.items():
        number = config["tree"]["number"]
        assert number == leader // 4
        assert [it["world"] for it in config["ranks"]] == list(range(leader, leader + 4))
        machines = machines_of(config["tree"])
        assert [one.ranks[0] for one in machines] == list(range(0, 64, 4))
        near = {4 * one for one in neighbours(number, 16)}
        assert near <= start.counts.senders[leader]
        assert len(start.counts.senders[leader]) <= len(near) + log2(64)  # who sums in a tree
    (identity,) = {identity for identity, *_ in start.identities}
    assert identity[0] == 0
    assert [it[1:] for it in start.identities] == [(rank, 64) for rank in range(64)]
    assert {it.nodes for it in start.topologies} == {tuple(rank // 4 for rank in range(64))}


def test_machines_whose_names_hash_alike_get_a_monitor_each(monkeypatch):
    start = started(monkeypatch, 8, 2, HERE, alike=True)
    assert sorted(start.monitors) == [0, 2, 4, 6]


def test_clocks_are_compared_in_a_tree():
    """Of one process they are one: the error is no more than what is said."""
    found, counts = compared_clocks(64)
    assert max(map(len, counts.senders.values())) == log2(64)
    assert found[0][1:] == (0.0, 0.0)
    for _, ahead, round_trip in found[1:]:
        assert abs(ahead) <= round_trip / 2
        assert round_trip > 0
