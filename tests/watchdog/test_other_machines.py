"""Monitors of other machines connect to the first one's: which may, and what strangers can't do."""

from __future__ import annotations

import contextlib
import socket
from types import SimpleNamespace

import pytest

from chainermn_comm.watchdog.monitor import other_machines
from tests.support.watchdog.links import Links, impatient, is_alone
from tests.support.watchdog.monitors import CUT, ENDED


@pytest.fixture
def links():
    made = Links()
    with impatient():
        assert made.until(made.are_linked)
        yield made
    made.close()


@pytest.mark.parametrize("error", [CUT, ENDED])
def test_a_link_that_breaks_is_made_again_and_was_cut_or_not(links, error):
    links.others.lose(links.others.linked[0], error)
    assert (links.others.cut_at() is not None) == (error is CUT)
    assert len(links.others.lost) == 1
    assert links.until(links.are_linked)
    assert links.others.cut_at() is None
    assert links.others.lost == {}


def test_where_nobody_answers_other_addresses_are_tried(links):
    """The kernel accepts connections for a monitor that is stopped, or another program's."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        links.first = links.connected(silent, links.listener)
        assert links.until(lambda: links.first.is_linked)


def test_a_liar_is_no_first_machine_and_learns_half_of_the_secret(links):
    with socket.create_server(("127.0.0.1", 0)) as liar:
        other = links.connected(liar)
        connection, _ = liar.accept()
        with connection:
            assert b"me" not in connection.recv(1024)
            connection.sendall(
                b'{"kind": "welcome", "answer": "you"}\n{"kind": "end"}\n'
            )
            assert links.until(lambda: is_alone(other))
    assert {"kind": "end"} not in links.heard


@pytest.mark.parametrize(
    "said",
    [
        b'{"kind": "hello", "question": "you?", "machine": "x"}\n',
        b'{"kind": "records", "ranks": []}\n',
        b"x" * 5000,
        b"\xff\n",
        b"\n\n",
        b"[2]\n",
        b'{"question": "\xc3\xa9", "machine": "x"}\n',
    ],
)
def test_who_does_not_know_the_secret_is_dropped_and_nobody_else(links, said):
    with links.stranger() as stranger:
        stranger.sendall(said)
        assert links.until(lambda: not links.others.strangers)
        assert stranger.recv(1024) == b""
    assert links.are_linked()


def test_strangers_are_few_and_have_little_time(links, monkeypatch):
    """2,000 connections that say nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(2000):
            where = links.listener.getsockname()
            stack.enter_context(socket.create_connection(where))
            links.until(lambda: True)
            links.poll()
            assert len(links.others.strangers) <= other_machines.MOST_STRANGERS
        assert links.are_linked()
        monkeypatch.setattr(other_machines, "GREETING_SECONDS", 0.1)
        assert links.until(lambda: not links.others.strangers)


def test_where_no_descriptor_is_left_no_core_is_kept_busy(links, monkeypatch):
    def accept():
        raise OSError(24, "Too many open files")

    slept = []
    with monkeypatch.context() as patched:
        patched.setattr(links.others, "_listener", SimpleNamespace(accept=accept))
        patched.setattr(other_machines.time, "sleep", slept.append)
        links.others._accept()
    assert slept == [other_machines.REFUSED_SECONDS]


def test_what_is_no_record_costs_the_link_which_is_made_again(links):
    links.first.send("records", ranks=[{"nonsense": 1}], has_stacks=False)
    assert links.until(lambda: not links.others.linked)
    assert links.until(links.are_linked)
