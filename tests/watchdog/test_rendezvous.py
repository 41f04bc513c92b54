"""The monitors of several machines are started together, and each learns of the others."""

from __future__ import annotations

import os
import warnings

import pytest

from chainermn_comm.watchdog.rank import rendezvous

pytestmark = [pytest.mark.world, pytest.mark.sizes(2), pytest.mark.ranks(2)]


def test_a_hub_that_can_not_listen_is_warned_of_and_keeps_nobody_waiting(world, monkeypatch):
    def listen():
        raise OSError("planted")

    started: list[dict] = []
    # Each rank is on a machine of its own.
    monkeypatch.setattr(rendezvous, "_machine_id", lambda: world.rank)
    monkeypatch.setattr(rendezvous, "listen", listen)
    monkeypatch.setattr(rendezvous, "_launch_monitor", started.append)
    monkeypatch.setattr(rendezvous.recorder.region(), "is_monitored", False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rendezvous.register(world, world.rank, rendezvous.Timeout()).release()
    assert ["planted" in str(one.message) for one in said] == [True] * (world.rank == 0)
    (config,) = started
    assert (config["listener"], config["star"]["endpoints"]) == (None, [])
    assert config["star"]["number"] == world.rank
    host = os.uname().nodename
    names = [f"rank 0 on {host}", f"rank 1 on {host}"]
    assert config["star"]["names"] == (names if world.rank == 0 else names[:1])
