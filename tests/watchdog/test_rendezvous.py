"""The monitors of several machines are started together, and each learns of the others."""

from __future__ import annotations

import socket
import warnings

import pytest

from chainermn_comm.watchdog.rank import rendezvous

pytestmark = [pytest.mark.world, pytest.mark.sizes(2), pytest.mark.ranks(2)]


def test_a_first_machine_that_can_not_listen_is_warned_of_and_keeps_nobody_waiting(
    world, monkeypatch
):
    def refuse(*_, **__):
        raise OSError("planted")

    told = []
    monkeypatch.setattr(rendezvous.socket, "create_server", refuse)
    monkeypatch.setattr(rendezvous, "_first_machine", None)
    monkeypatch.setattr(rendezvous, "tell_monitor", lambda *what: told.append(what))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rendezvous._introduce_first_machine(world, machine=world.rank)
    found = ["planted" in str(one.message) for one in said]
    assert found == [True] * (world.rank == 0)
    assert [what["endpoints"] for (what,) in told] == [[]] * world.rank


def test_a_machines_addresses_are_those_of_its_interfaces_but_the_loopbacks():
    found = rendezvous.own_addresses()
    assert len(set(found)) == len(found)
    for one in found:
        assert not one.startswith("127.")
        with socket.socket() as bound:
            bound.bind((one, 0))  # only a machine's own can be bound
