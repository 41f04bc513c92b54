"""What the doctor's ranks exchange over hosts, on ranks that take themselves for hosts."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from chainermn_comm import create_communicator
from chainermn_tools.doctor.ranks import rank_tests
from tests.support.doctor import COMMUNICATORS

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3)]


def exchange(world, address: str | None, *pairs: tuple[str, str]) -> tuple[bool, list[Any]]:
    """Whether none stalled, and what all ranks said (collective)."""
    said: list[dict] = []
    hosts = [f"host{rank}" for rank in range(world.size)]
    order = [(a, b, address) for a, b in pairs]
    well = rank_tests.exchange_messages(world, hosts, order, lambda **record: said.append(record))
    return well, [one for every in world.allgather(said) for one in every]


@pytest.mark.parametrize("address", ["127.0.0.1", None])
def test_large_messages_come_back_as_they_were_sent(world, address):
    last = f"host{world.size - 1}"
    pairs = [("host0", last), (last, "host0"), ("host0", "of nobody")]
    well, said = exchange(world, address, *pairs)
    assert well
    assert [one["pair"] for one in said] == [list(two) for two in pairs[:2]]
    for one in said:
        assert (one["stalled"], one["correct"]) == (False, True)
        assert one["seconds"] > 0
        assert (one["tcp_seconds"] is None) == (address is None)


@pytest.mark.ranks(2)
def test_what_comes_back_wrong_is_noticed(world, monkeypatch):
    monkeypatch.setattr(rank_tests, "matches_pattern", lambda *_, **__: False)
    well, said = exchange(world, None, ("host0", "host1"))
    assert (well, said[-1]["correct"]) == (True, False)


def test_a_connection_that_stalls_keeps_mpi_from_being_tried(world, monkeypatch):
    """Rank 1 takes it, and reads next to nothing."""
    monkeypatch.setattr(rank_tests, "STALL_SECONDS", 0.5)
    with contextlib.ExitStack() as taken:

        def take(listener: Any, _: int) -> None:
            taken.enter_context(listener.accept()[0]).recv(1)

        if world.rank == 1:
            monkeypatch.setattr(rank_tests, "_receive_over_tcp", take)
        well, said = exchange(world, "127.0.0.1", ("host0", "host1"))
    assert not well, "on all ranks"
    assert said == [{"pair": ["host0", "host1"], "stalled": True}]


def test_no_communicator_is_forgotten(world):
    """The error for an unknown name lists those that there are."""
    with pytest.raises(ValueError, match="use one of: ") as refused:
        create_communicator("unknown", world)
    known = str(refused.value).partition("use one of: ")[2]
    assert known.split(", ") == sorted(COMMUNICATORS)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", COMMUNICATORS)
def test_every_communicator_is_tried(world, name):
    found = rank_tests.try_communicator(world, name, timed=False)
    assert found.get("correct", "reason" in found), found
    assert "bytes_per_second" not in found
