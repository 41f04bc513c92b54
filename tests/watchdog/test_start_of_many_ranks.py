"""What each rank receives and does at its start, of 16 to 256 ranks over a double of MPI."""

from __future__ import annotations

from math import log2

import pytest

from tests.watchdog.starting import compared_clocks, started

pytestmark = pytest.mark.ci

HERE = ["127.0.0.1"]
# Each rank's part of what is gathered from all: handshake, colors and keys of four
# splits, node.
BYTES_A_RANK = 128 + 4 * 8 + 4
# Besides: the ranks of the own machine describe themselves, and rank 0 gets each
# machine's name and addresses.
BYTES_A_NEIGHBOUR, BYTES_A_MACHINE = 1500, 100
LINES_A_MACHINE = 30


@pytest.mark.parametrize("ranks_per_node", [1, 8])
def test_each_rank_receives_little_of_each_other_and_rank_0_a_name_of_each_machine(
    monkeypatch, ranks_per_node
):
    lines = []
    for size in (64, 256):
        start = started(monkeypatch, size, ranks_per_node, HERE)
        near = BYTES_A_NEIGHBOUR * (ranks_per_node + 1)
        received = dict(start.counts.received)
        first = received.pop(0)
        assert max(received.values()) <= BYTES_A_RANK * size + near
        assert (
            first
            <= BYTES_A_RANK * size + near + BYTES_A_MACHINE * size // ranks_per_node
        )
        lines.append(dict(start.counts.lines))
    few, many = (found.pop(0) for found in lines)
    assert many - few <= LINES_A_MACHINE * (256 - 64) / ranks_per_node + 32
    # For more steps in trees.
    assert max(lines[1].values()) <= max(lines[0].values()) + 32


def test_each_machine_gets_a_monitor_that_knows_the_hub_which_knows_all_names(
    monkeypatch,
):
    start = started(monkeypatch, 64, 4, HERE)
    assert sorted(start.monitors) == list(range(0, 64, 4))
    hub = start.monitors[0]["star"]
    assert [name.split(",")[0] for name in hub["names"]] == [
        f"ranks {n}" for n in range(0, 64, 4)
    ]
    for leader, config in start.monitors.items():
        star = config["star"]
        assert star["number"] == leader // 4
        assert [it["world"] for it in config["ranks"]] == list(
            range(leader, leader + 4)
        )
        assert star["secret"] == hub["secret"]
        assert star["names"] == (hub["names"] if leader == 0 else hub["names"][:1])
        assert (config["listener"] is not None) == (leader == 0)
        ((address, port),) = star["endpoints"]
        assert (address, port) == ("127.0.0.1", hub["endpoints"][0][1])
        if leader:
            # Who sums in a tree.
            assert len(start.counts.senders[leader]) <= 4 + 1 + log2(64)
    (identity,) = {identity for identity, *_ in start.identities}
    assert identity[0] == 0
    assert [it[1:] for it in start.identities] == [(rank, 64) for rank in range(64)]
    assert {it.nodes for it in start.topologies} == {
        tuple(rank // 4 for rank in range(64))
    }


def test_containers_of_one_machine_get_a_monitor_each(monkeypatch):
    start = started(monkeypatch, 8, 4, HERE, ranks_per_namespace=2)
    assert sorted(start.monitors) == [0, 2, 4, 6]


def test_clocks_are_compared_by_barriers():
    """Of one process they are one: the error is no more than what is said."""
    found = compared_clocks(64)
    assert found[0][1:] == (0.0, 0.0)
    for _, ahead, round_trip in found[1:]:
        assert abs(ahead) <= round_trip / 2
        assert round_trip > 0
