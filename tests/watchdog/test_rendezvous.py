"""The monitors of several machines are started together, and each learns of the others."""

from __future__ import annotations

import warnings

import pytest

from chainermn_comm.watchdog import rendezvous
from tests.support import monitors

pytestmark = [pytest.mark.world, pytest.mark.sizes(2), pytest.mark.ranks(2)]


def test_a_machine_that_can_not_be_asked_is_warned_of_and_keeps_nobody_waiting(world, monkeypatch):
    def launch(config, listeners):
        started.append(config)
        for listener in listeners:
            listener.close()

    started: list[dict] = []
    # Each rank is on a machine of its own, and nothing leads from rank 1's to the other one.
    addresses = {0: ["127.0.0.1"], 1: []}[world.rank]
    monkeypatch.setattr(rendezvous, "_machine_id", lambda: world.rank)
    monkeypatch.setattr(rendezvous, "addresses_towards", lambda *_: addresses)
    monkeypatch.setattr(rendezvous, "_launch_monitor", launch)
    monkeypatch.setattr(rendezvous.recorder.region(), "is_monitored", False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rendezvous.register(world, world.rank, rendezvous.Timeout()).release()
    unheard = "no address to listen on (none has a route to the job's other hosts)"
    assert [unheard in str(one.message) for one in said] == [True] * world.rank
    (config,) = started
    assert len(config["listeners"]) == len(addresses)
    assert config["tree"]["number"] == world.rank
    machines = monitors.machines_of(config["tree"])
    assert [one.ranks for one in machines] == [(0,), (1,)]
    assert [len(one.endpoints) for one in machines] == [1, 0]
