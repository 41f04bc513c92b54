"""Monitors of other machines connect to the first one's: which may, and what strangers can't do."""

from __future__ import annotations

import socket
from contextlib import suppress

import pytest

from tests.support.watchdog.monitors import Links, impatient


@pytest.fixture
def links():
    made = Links()
    with impatient():
        assert made.until(made.are_linked)
        yield made
    made.close()


def is_dropped(connection):
    """Whether the other side has closed it, and said nothing before."""
    connection.setblocking(False)
    with suppress(BlockingIOError):
        return connection.recv(1024) == b""
    return False


def test_where_nobody_answers_other_addresses_are_tried(links):
    """The kernel accepts connections for a monitor that is stopped, or another program's."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        links.first = links.connected(silent, links.listener)
        assert links.until(lambda: links.first.is_linked)


def test_a_liar_is_no_first_machine_and_learns_half_of_the_secret(links):
    with socket.create_server(("127.0.0.1", 0)) as liar:
        links.first = links.connected(liar)
        links.until(lambda: False, 0.05)
        connection, _ = liar.accept()
        with connection:
            assert b'"me"' not in connection.recv(1024)
            connection.sendall(b'{"kind": "hello", "secret": "you"}\n{"kind": "end"}\n')
            assert links.until(lambda: is_dropped(connection))
    assert {"kind": "end"} not in links.heard


@pytest.mark.parametrize(
    "said",
    [
        b'{"kind": "hello", "secret": "you?"}\n',
        b'{"kind": "records", "ranks": []}\n',
        b"\xff\n",
        b"\n\n",
        b"[2]\n",
        b'{"secret": "\xc3\xa9"}\n',
    ],
)
def test_who_does_not_know_the_secret_is_dropped_and_nobody_else(links, said):
    with links.stranger() as stranger:
        stranger.sendall(said)
        assert links.until(lambda: is_dropped(stranger))
    assert links.are_linked()


def test_what_is_no_record_costs_the_link(links):
    links.first.send("records", ranks=[{"nonsense": 1}], number=1, sent_at=0.0)
    assert links.until(lambda: not links.others.linked)
