"""Where the first machine's monitor listens, and on which addresses others may reach it."""

from __future__ import annotations

import socket

import pytest

from chainermn_comm.watchdog.rank import addresses


@pytest.mark.parametrize("ipv6", [False, True])
def test_it_listens_on_all_addresses(monkeypatch, ipv6):
    if ipv6 and not socket.has_dualstack_ipv6():
        pytest.skip("the kernel has no IPv6")
    monkeypatch.setattr(addresses.socket, "has_dualstack_ipv6", lambda: ipv6)
    with addresses.listen() as listener:
        for host in ("127.0.0.1", "127.0.0.3", *(["::1"] * ipv6)):
            with socket.create_connection((host, listener.getsockname()[1])) as made:
                assert made.getpeername()[0] == host


def test_a_machines_addresses_are_those_of_its_interfaces_but_the_loopbacks():
    found = addresses.own_addresses()
    assert len(set(found)) == len(found)
    for one in found:
        assert not one.startswith("127.")
        family = socket.AF_INET6 if ":" in one else socket.AF_INET
        with socket.socket(family) as bound:
            bound.bind((one, 0))  # only a machine's own can be bound
