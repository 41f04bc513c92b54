"""What the doctor's ranks exchange over hosts, on ranks that take themselves for hosts."""

from __future__ import annotations

from typing import Any

import pytest

from chainermn_tools.doctor.ranks import rank_tests
from tests.support.tools.doctor import COMMUNICATORS
from tests.support.worlds.topologies import KNOWN

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3)]


def exchange(world, *pairs: tuple[str, str]) -> list[Any]:
    """What all ranks said (collective)."""
    said: list[dict] = []
    hosts = [f"host{rank}" for rank in range(world.size)]
    rank_tests.exchange_messages(
        world, hosts, pairs, lambda **record: said.append(record)
    )
    return [one for every in world.allgather(said) for one in every]


def test_large_messages_come_back_as_they_were_sent(world):
    last = f"host{world.size - 1}"
    pairs = [("host0", last), (last, "host0"), ("host0", "of nobody")]
    said = exchange(world, *pairs)
    assert [one["pair"] for one in said] == [list(two) for two in pairs[:2]]
    for one in said:
        assert one["correct"]
        assert one["seconds"] > 0


@pytest.mark.ranks(2)
def test_what_comes_back_wrong_is_noticed(world, monkeypatch):
    monkeypatch.setattr(rank_tests, "matches_pattern", lambda *_, **__: False)
    said = exchange(world, ("host0", "host1"))
    assert not said[-1]["correct"]


def test_no_communicator_is_forgotten():
    assert sorted(COMMUNICATORS) == sorted(KNOWN)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", COMMUNICATORS)
def test_every_communicator_is_tried(world, name):
    found = rank_tests.try_communicator(world, name, timed=False)
    assert found.get("correct", "reason" in found), found
    assert "bytes_per_second" not in found
