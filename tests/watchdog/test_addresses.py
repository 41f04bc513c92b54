"""On which addresses other machines may reach the monitor of the first one."""

from __future__ import annotations

import socket

from chainermn_comm.watchdog.rank import rendezvous


def test_a_machines_addresses_are_those_of_its_interfaces_but_the_loopbacks():
    found = rendezvous.own_addresses()
    assert len(set(found)) == len(found)
    for one in found:
        assert not one.startswith("127.")
        with socket.socket() as bound:
            bound.bind((one, 0))  # only a machine's own can be bound
