"""Monitors that query one another."""

from __future__ import annotations

import errno
import json
import socket
import threading
from types import SimpleNamespace

import pytest

from chainermn_comm.watchdog import network
from chainermn_comm.watchdog.network import Peer, serve
from tests.support.monitors import machine


def peer(listener, secret="x"):
    return Peer(machine("near", [0], [listener]), secret)


def test_no_core_is_kept_busy_while_no_connection_can_be_taken(monkeypatch):
    def accept():
        happened.append("refused")
        if len(happened) > 6:
            raise KeyboardInterrupt
        raise OSError(errno.EMFILE, "Too many open files")

    happened: list[str] = []
    monkeypatch.setattr(network, "time", SimpleNamespace(sleep=lambda _: happened.append("slept")))
    with pytest.raises(KeyboardInterrupt):
        serve(SimpleNamespace(accept=accept, fileno=lambda: 0), "x", dict)
    assert happened == ["refused", "slept"] * 3 + ["refused"]


@pytest.fixture
def listening():
    """A monitor's socket and its port; and questions that were answered there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        queried: list[str] = []
        reply = lambda kind: queried.append(kind) or {"yes": kind}  # noqa: E731
        threading.Thread(target=serve, args=(listener, "x", reply), daemon=True).start()
        yield listener, queried


def test_who_does_not_know_the_secret_gets_no_answer(listening):
    listener, queried = listening
    assert peer(listener).query("calls", 5.0) == {"yes": "calls"}
    stranger = peer(listener, "y")
    with pytest.raises(OSError, match="near doesn't answer"):
        stranger.query("stacks", 5.0)
    with socket.create_connection(listener.getsockname()) as connection:
        connection.sendall(b"stacks\n")
        with connection.makefile("rb") as file:
            assert len(file.readlines()) == 1  # the challenge
    assert queried == ["calls"]


def test_the_secret_does_not_travel_and_who_does_not_know_it_can_not_answer():
    def take(listener):
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as file:
            connection.sendall(b"challenge\n")
            heard.append(file.readline())
            connection.sendall(json.dumps([json.loads(heard[0])[0], '{"ended": true}']).encode())

    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=take, args=(listener,), daemon=True).start()
        liar = peer(listener, "the secret")
        with pytest.raises(OSError, match="a line without proof"):
            liar.query("alive", 5.0)
    assert json.loads(heard[0])[2] == "alive"
    assert b"secret" not in heard[0]


def test_monitors_listen_on_the_addresses_towards_the_other_hosts_and_no_others():
    assert network.addresses_towards(["127.0.0.1", "192.0.2.7"], [["127.0.0.2"]]) == ["127.0.0.1"]
    # An address that both have, such as a bridge's, leads to this host itself.
    both = ["127.0.0.1", "127.0.0.9"]
    assert network.addresses_towards(both, [["127.0.0.9", "127.0.0.2"]]) == ["127.0.0.1"]
    # But for containers that share all of them.
    assert network.addresses_towards(["127.0.0.1"], [["127.0.0.1"]]) == ["127.0.0.1"]
    (listener,) = network.listen(["127.0.0.3"])
    with listener:
        assert listener.getsockname()[0] == "127.0.0.3"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
    with pytest.raises(OSError, match="none has a route"):
        network.listen([])


def test_where_there_is_ipv6_alone_monitors_listen_and_query_there():
    assert network.addresses_towards(["::1"], [["::1"]]) == ["::1"]
    (listener,) = network.listen(["::1"])
    with listener:
        threading.Thread(target=serve, args=(listener, "x", lambda _: {}), daemon=True).start()
        assert peer(listener).query("calls", 5.0) == {}
