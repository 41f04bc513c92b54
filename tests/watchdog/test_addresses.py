"""The addresses on which the first machine's monitor listens."""

from __future__ import annotations

import socket

import pytest

from chainermn_comm.watchdog.rank import addresses


def test_monitors_listen_on_the_addresses_towards_the_other_hosts_and_no_others():
    assert addresses.addresses_towards(["127.0.0.1", "192.0.2.7"], [["127.0.0.2"]]) == ["127.0.0.1"]
    # An address that both have, such as a bridge's, leads to this host itself.
    both = ["127.0.0.1", "127.0.0.9"]
    assert addresses.addresses_towards(both, [["127.0.0.9", "127.0.0.2"]]) == ["127.0.0.1"]
    # But for containers that share all of them.
    assert addresses.addresses_towards(["127.0.0.1"], [["127.0.0.1"]]) == ["127.0.0.1"]
    (listener,) = addresses.listen(["127.0.0.3"])
    with listener:
        assert listener.getsockname()[0] == "127.0.0.3"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
    with pytest.raises(OSError, match="none has a route"):
        addresses.listen([])


def test_where_there_is_ipv6_alone_it_listens_there():
    assert addresses.addresses_towards(["::1"], [["::1"]]) == ["::1"]
    (listener,) = addresses.listen(["::1"])
    with listener, socket.create_connection(listener.getsockname()[:2]):
        assert listener.family == socket.AF_INET6
